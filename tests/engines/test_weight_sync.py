"""Fingerprints and the proof that what reaches an engine is what the trainer has."""

import pytest
import torch

from lightrl.engines.base import WeightSyncError
from lightrl.engines.weight_sync import WeightProof, fingerprint, is_same


def test_a_fingerprint_by_hand_and_by_shards() -> None:
    # 1 + 2 - 3 + 4 = 4; 1 + 4 + 9 + 16 = 30
    assert fingerprint(torch.tensor([[1.0, 2.0], [-3.0, 4.0]])) == (4.0, 30.0, 4.0)
    tensor = torch.randn(1000, 7, generator=torch.Generator().manual_seed(0))
    shards = [fingerprint(part) for part in tensor.split(300)]
    assert is_same(fingerprint(tensor), type(shards[0])(*map(sum, zip(*shards, strict=True))))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_any_change_of_one_value_shows(dtype: torch.dtype) -> None:
    tensor = torch.randn(64, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    own = fingerprint(tensor)
    assert is_same(own, fingerprint(tensor.clone()))
    changed = tensor.clone()
    changed[5, 7] *= 1.01
    assert not is_same(own, fingerprint(changed))
    assert not is_same(own, fingerprint(-tensor))
    assert not is_same(own, fingerprint(tensor[:63]))
    changed[5, 7] = float("nan")
    assert not is_same(fingerprint(changed), fingerprint(changed))


def test_all_zeros_are_the_same_as_all_zeros() -> None:
    assert is_same(fingerprint(torch.zeros(5)), fingerprint(torch.zeros(5)))


WEIGHTS = {name: torch.randn(3, 4, generator=torch.Generator().manual_seed(seed)) for seed, name in enumerate("abcd")}
EXPECTED = {name: fingerprint(tensor) for name, tensor in WEIGHTS.items()}


def problems(sent: list[tuple[str, torch.Tensor]]) -> str:
    proof = WeightProof(EXPECTED)
    assert list(proof.watched(sent)) == sent
    assert proof.num_bytes == sum(tensor.nbytes for _, tensor in sent)
    with pytest.raises(WeightSyncError, match="Weight sync to version 7 failed: ") as error:
        proof.finish(7)
    return str(error.value).removeprefix("Weight sync to version 7 failed: ")


def test_each_kind_of_sabotage_is_named() -> None:
    good = list(WEIGHTS.items())
    proof = WeightProof(EXPECTED)
    assert list(proof.watched(good)) == good
    proof.finish(7)
    assert problems(good[1:]) == "missing a."
    swapped = [("a", WEIGHTS["b"]), ("b", WEIGHTS["a"]), *good[2:]]
    assert problems(swapped) == "a differs from the trainer's; b differs from the trainer's."
    assert problems([("a", WEIGHTS["a"] * 1.01), *good[1:]]) == "a differs from the trainer's."
    assert problems([*good, ("e", torch.zeros(1))]) == "unknown e."
    assert problems([*good, good[0]]) == "a came twice."


def test_without_expectations_bytes_are_counted_only() -> None:
    proof = WeightProof(None)
    list(proof.watched([("x", torch.zeros(5)), ("x", torch.zeros(5))]))
    proof.finish(0)
    assert proof.num_bytes == 40


def test_a_long_list_of_problems_is_cut() -> None:
    proof = WeightProof({f"w{place}": fingerprint(torch.zeros(1)) for place in range(30)})
    list(proof.watched([]))
    with pytest.raises(WeightSyncError, match="missing w9; .*and 10 more"):
        proof.finish(1)
