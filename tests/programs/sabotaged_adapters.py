"""Wraps our loader of adapters so that a chosen fault reaches SGLang's memory; runs in SGLang's schedulers."""

import json
from pathlib import Path

import torch
from sabotaged_loader import FAULT_FILE

from lightrl.engines.sglang import adapted_loader, loader
from lightrl.engines.sglang.adapted_loader import AdapterSlots

SLOTS_FILE = "slots"  # the elements of all slots, after the fault "count_slots"
VICTIM = "model.layers.1.self_attn.v_proj.lora_B.weight"


def load_bucket(model, named_tensors):
    head = json.loads(dict(named_tensors)["head"].cpu().numpy().tobytes())
    fault, victim = chosen_fault(head)
    honest, change = AdapterSlots.take, CHANGES.get(fault, lambda tensor: tensor)
    AdapterSlots.take = lambda self, item, tensor: honest(
        self, item, change(tensor) if item["name"] == victim else tensor
    )
    if fault == "scale_of_engine":
        set_scale(model, 2)
    elif fault in DAMAGES:
        damage(model, victim, DAMAGES[fault])
    elif fault == "count_slots":
        counted = sum(module.lora_a.numel() + module.lora_b.numel() for module in wrappers(model))
        (Path(head["report"]) / SLOTS_FILE).write_text(str(counted))
    elif fault == "memory_given_back":
        for module in wrappers(model):
            module.lora_a.fill_(3)
            module.lora_b.fill_(3)
    try:
        adapted_loader.load_bucket(model, named_tensors)
    finally:
        AdapterSlots.take = honest
        set_scale(model, 1)
    if fault == "double_unseen":
        for module in wrappers(model):
            module.lora_b[adapted_loader._adapters.slots["policy"]].mul_(2)


def chosen_fault(head):
    """The fault, and the factor that it befalls; the file may name another factor, and a single scheduler."""
    file = Path(head["report"]) / FAULT_FILE
    fault, victim, rank = ([*file.read_text().split(), None, None] if file.is_file() else ["nothing", None, None])[:3]
    is_here = rank is None or int(rank) == loader._tp_rank_and_size()[0]
    return fault if is_here else "nothing", victim or VICTIM


CHANGES = {"lose_one": torch.zeros_like, "double_one": lambda tensor: 2 * tensor}
DAMAGES = {"lose_judge": 0, "double_judge": 2}  # of what lies in memory since an earlier sync


def wrappers(model):
    return [module for module in model.modules() if hasattr(module, "lora_b")]


def set_scale(model, scale):
    info, slot = wrappers(model)[0].lora_backend.get_batch_info(), adapted_loader._adapters.slots.get("policy", 1)
    info.scalings[slot] = scale


def damage(model, victim, factor):
    """Changes a factor of the judge beside a layer that is not fused with others."""
    layer, _, part = victim.removesuffix(".weight").rpartition(".")
    getattr(model.get_submodule(layer), part.lower())[adapted_loader._adapters.slots["judge"]].mul_(factor)
