"""Wraps our loader of weights so that a chosen fault reaches SGLang's loader; runs in SGLang's schedulers."""

import json
from pathlib import Path

from lightrl.engines.sglang import loader

FAULT_FILE = "fault"  # beside the reports; holds the name of a function below


def load_bucket(model, named_tensors):
    head = json.loads(dict(named_tensors)["head"].cpu().numpy().tobytes())
    file = Path(head["report"]) / FAULT_FILE
    if not file.is_file():
        return loader.load_bucket(model, named_tensors)
    fault, real = globals()[file.read_text()], model.load_weights
    model.load_weights = lambda weights: real(fault(list(weights)))
    try:
        return loader.load_bucket(model, named_tensors)
    finally:
        del model.load_weights


def skip_one(weights):
    return [pair for pair in weights if pair[0] != "model.layers.1.self_attn.k_proj.weight"]


def swap_two(weights):
    other = {"input_layernorm": "post_attention_layernorm", "post_attention_layernorm": "input_layernorm"}
    return [
        (name.replace(name.split(".")[-2], other[name.split(".")[-2]]), tensor)
        if name.startswith("model.layers.0.") and name.split(".")[-2] in other
        else (name, tensor)
        for name, tensor in weights
    ]


def swap_gate_and_up(weights):
    other = {"gate_proj": "up_proj", "up_proj": "gate_proj"}
    return [
        (name.replace(name.split(".")[-2], other.get(name.split(".")[-2], name.split(".")[-2])), tensor)
        for name, tensor in weights
    ]


def scale_one(weights):
    return [
        (name, tensor * 1.01 if name == "model.layers.0.mlp.down_proj.weight" else tensor) for name, tensor in weights
    ]


def keep_old(weights):
    return []


def skip_vision(weights):
    return [pair for pair in weights if "visual.blocks.0.attn.qkv." not in pair[0]]


def break_down(weights):
    raise RuntimeError("out of order")
