"""Wraps our loader of adapters so that a chosen fault reaches SGLang's memory; runs in SGLang's schedulers."""

import json
from pathlib import Path

import torch
from sabotaged_loader import FAULT_FILE

from lightrl.engines.sglang import adapted_loader
from lightrl.engines.sglang.adapted_loader import AdapterSlots

VICTIM = "model.layers.1.self_attn.v_proj.lora_B.weight"


def load_bucket(model, named_tensors):
    head = json.loads(dict(named_tensors)["head"].cpu().numpy().tobytes())
    file = Path(head["report"]) / FAULT_FILE
    fault = file.read_text() if file.is_file() else "nothing"
    honest, change = AdapterSlots.take, CHANGES.get(fault, lambda tensor: tensor)
    AdapterSlots.take = lambda self, item, tensor: honest(
        self, item, change(tensor) if item["name"] == VICTIM else tensor
    )
    if fault == "scale_of_engine":
        set_scale(model, 2)
    try:
        adapted_loader.load_bucket(model, named_tensors)
    finally:
        AdapterSlots.take = honest
        set_scale(model, 1)
    if fault == "double_unseen":
        for module in wrappers(model):
            module.lora_b.mul_(2)


CHANGES = {"lose_one": torch.zeros_like, "double_one": lambda tensor: 2 * tensor}


def wrappers(model):
    return [module for module in model.modules() if hasattr(module, "lora_b")]


def set_scale(model, scale):
    wrappers(model)[0].lora_backend.get_batch_info().scalings[1] = scale
