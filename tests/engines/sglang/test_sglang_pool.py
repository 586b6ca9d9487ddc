"""Adapters in memory that is laid out as SGLang's pool: where each factor goes, and how a lost one is named."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from lightrl.engines.sglang import adapted_loader, loader
from lightrl.engines.sglang.loader import Bucket, read_reports

RANK, SLOTS = 2, 4  # the largest rank, and no adapter, the policy's and two more


class _Linear(nn.Module):
    def __init__(self, outputs, inputs, **attributes):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(outputs, inputs))
        for name, value in attributes.items():
            setattr(self, name, value)


class _Wrapper(nn.Module):
    """A layer with room for adapters; parts: of the layers that are fused in it."""

    def __init__(self, base_layer, backend, parts):
        super().__init__()
        outputs, inputs = base_layer.weight.shape
        self.base_layer, self.lora_backend = base_layer, backend
        self.lora_a = torch.full((SLOTS, parts * RANK, inputs), 9.0)  # what an earlier adapter left
        self.lora_b = torch.full((SLOTS, outputs, RANK), 9.0)

    def set_lora(self):
        """Has a name that tells a wrapper."""


class _Scheduler:
    """A layer of two fused ones, of 3 inputs and 2 outputs each, and one of 2 inputs and 3 outputs."""

    def __init__(self, folder):
        self.info = SimpleNamespace(weight_indices=[0], lora_ranks=[0] * SLOTS, scalings=[0.0] * SLOTS)
        backend = SimpleNamespace(get_batch_info=lambda: self.info)
        self.model, self.folder = nn.Module(), folder
        self.model.gate_up_proj = _Wrapper(_Linear(4, 3, output_sizes=[2, 2]), backend, 2)
        self.model.down_proj = _Wrapper(_Linear(3, 2), backend, 1)

    def run_batch_of(self, slot, scale=1.0):
        self.info.weight_indices = [slot]
        self.info.lora_ranks = [RANK * (i == slot) for i in range(SLOTS)]
        self.info.scalings = [scale * (i == slot) for i in range(SLOTS)]

    def send(self, tensors):
        bucket = Bucket()
        for name, tensor in tensors.items():
            bucket.add(name, tensor)
        where = {"report": str(self.folder), "device": torch.device("cpu")}
        adapted_loader.load_bucket(self.model, bucket.pack(is_first=True, is_last=True, **where))
        problems, _ = read_reports(self.folder, 1)
        return problems


POLICY = {
    "up_proj.lora_A.weight": torch.tensor([[1.0, 2, 3], [4, 5, 6]]),
    "up_proj.lora_B.weight": torch.tensor([[1.0, 2], [3, 4]]),
}
RIVAL = {
    "rival:down_proj.lora_A.weight": torch.tensor([[7.0, 8]]),
    "rival:down_proj.lora_B.weight": torch.tensor([[1.0], [2], [3]]),
    "rival:up_proj.lora_A.weight": torch.tensor([[4.0, 5, 6]]),
    "rival:up_proj.lora_B.weight": torch.tensor([[7.0], [8]]),
}


@pytest.fixture
def scheduler(tmp_path, monkeypatch):
    """One that knows that the policy's adapter lies in slot 3, and the rival's in slot 1."""
    monkeypatch.setattr(loader, "_tp_rank_and_size", lambda: (0, 1))
    monkeypatch.setattr(adapted_loader, "_adapters", adapted_loader.Adapters())
    made = _Scheduler(tmp_path)
    for name, slot in (("policy", 3), ("rival", 1)):
        made.run_batch_of(slot)
        assert made.send({name + adapted_loader.IN_USE: torch.zeros(1)}) == []
    return made


def test_each_adapter_goes_where_its_batch_read(scheduler):
    assert scheduler.send({**POLICY, **RIVAL}) == []
    fused, single = scheduler.model.gate_up_proj, scheduler.model.down_proj
    # The second of two fused layers: its rows stand behind those of the first, in both factors.
    assert fused.lora_a[3].tolist() == [[0, 0, 0], [0, 0, 0], [1, 2, 3], [4, 5, 6]]
    assert fused.lora_b[3].tolist() == [[0, 0], [0, 0], [1, 2], [3, 4]]
    assert not single.lora_a[3].any()  # which the policy has none beside
    assert single.lora_a[1].tolist() == [[7, 8], [0, 0]]  # of rank 1, where there is room for 2
    assert single.lora_b[1].tolist() == [[1, 0], [2, 0], [3, 0]]
    assert fused.lora_a[1].tolist() == [[0, 0, 0], [0, 0, 0], [4, 5, 6], [0, 0, 0]]  # behind the room for a rank of 2
    assert fused.lora_b[1].tolist() == [[0, 0], [0, 0], [7, 0], [8, 0]]
    assert (fused.lora_a[[0, 2]] == 9).all()  # others are left alone


def test_an_adapter_that_stays_is_read_back_at_each_sync(scheduler):
    assert scheduler.send({**POLICY, **RIVAL}) == []
    changed = {name: 2 * tensor for name, tensor in POLICY.items()}
    assert scheduler.send(changed) == []
    scheduler.model.down_proj.lora_b[1].mul_(2)
    assert scheduler.send(POLICY) == ["rival:down_proj.lora_B.weight is not held as it was given"]
    assert scheduler.send({**POLICY, **RIVAL}) == []


def test_a_scale_beside_the_factors_own_is_named_for_the_adapter_that_has_it(scheduler):
    scheduler.run_batch_of(1, scale=2.0)
    named = "SGLang's last batch multiplied the adapter rival by 2, not by 1"
    assert scheduler.send({**POLICY, **RIVAL}) == [named]
    scheduler.run_batch_of(0, scale=0.0)  # of requests without adapters
    assert scheduler.send(POLICY) == []


def test_a_layer_without_room_is_named(scheduler):
    stray = {name.replace("down", "gone"): tensor for name, tensor in RIVAL.items() if "down" in name}
    (problem,) = scheduler.send({**POLICY, **stray})
    assert problem.startswith("SGLang has no place for the adapter of rival:gone_proj: use --lora.engine merged")
