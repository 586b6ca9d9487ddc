"""The account of a weight sync: names, shapes, and whether values that were given are held."""

import zlib
from typing import Any

import pytest
import torch
from torch import nn
from transformers import Qwen3Config, Qwen3ForCausalLM

from lightrl.comm import Comm
from lightrl.engines.base import WeightSyncError, skeleton
from lightrl.engines.weights.account import (
    Place,
    RankAgreement,
    WeightAccount,
    WeightProof,
    few_values,
    named_shapes,
    raise_problems,
    require_same_names,
    sampled_indices,
)
from lightrl.engines.weights.fingerprint import Placed, Sums, fingerprint

TEXT = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
}


class Weights(nn.Module):
    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(shape))


def sorted_pairs(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return sorted((name, parameter.detach()) for name, parameter in model.named_parameters())


def test_missing_unknown_misshapen_and_repeated_weights_are_named() -> None:
    model = Qwen3ForCausalLM(Qwen3Config(**TEXT, tie_word_embeddings=True))
    account = WeightAccount.of_model(skeleton(model))
    for name, tensor in sorted_pairs(model):
        if name == "model.norm.weight":
            assert not account.accept(name, tensor[:-1])
        elif name != "model.layers.1.mlp.up_proj.weight":
            assert account.accept(name, tensor)
    assert account.accept("lm_head.weight", model.lm_head.weight)  # tied: under each of its names
    assert not account.accept("lm_head.bias", torch.zeros(1))
    assert not account.accept("lm_head.weight", model.lm_head.weight)
    assert account.problems() == [
        "misshapen model.norm.weight: got (15,), the model has (16,)",
        "unknown lm_head.bias",
        "lm_head.weight came twice",
        "missing model.layers.1.mlp.up_proj.weight",
    ]


def test_tied_weights_may_come_under_one_name() -> None:
    model = Qwen3ForCausalLM(Qwen3Config(**TEXT, tie_word_embeddings=True))
    account = WeightAccount.of_model(skeleton(model))
    assert all(account.accept(name, tensor) for name, tensor in sorted_pairs(model))
    assert account.problems() == []


def test_tied_parameters_are_one_group() -> None:
    model = nn.Module()
    model.embed, model.head, model.other = Weights(3, 2), Weights(3, 2), Weights(1)
    model.head.weight = model.embed.weight
    shapes, tied = named_shapes(model)
    assert shapes == {"embed.weight": (3, 2), "head.weight": (3, 2), "other.weight": (1,)}
    assert tied == [frozenset(["embed.weight", "head.weight"])]
    assert WeightAccount(shapes, tied).problems() == ["missing embed.weight", "missing other.weight"]


def test_a_long_list_of_problems_is_cut() -> None:
    raise_problems([], "Weight sync to version 1")
    with pytest.raises(WeightSyncError, match="Weight sync to version 1 failed: p0; p1; .*p19; and 2 more"):
        raise_problems([f"p{index}" for index in range(22)], "Weight sync to version 1")
    with pytest.raises(WeightSyncError, match=r"; p19\.$"):
        raise_problems([f"p{index}" for index in range(20)], "Weight sync to version 1")


def held(parameter: nn.Parameter, given: torch.Tensor, place: Place | None = None) -> bool:
    """Whether the parameter passes as what was given before."""
    account = WeightAccount({"w": tuple(given.shape)})
    account.accept("w", given)
    account.remember_values("w", given, parameter, place)
    lines = account.problems()
    assert lines in ([], ["the engine does not hold w as it was given"])
    return not lines


def test_what_is_not_held_is_named() -> None:
    parameter, given = nn.Parameter(torch.zeros(6, 8)), torch.randn(6, 8)
    assert not held(parameter, given)
    parameter.data.copy_(given)
    assert held(parameter, given)
    parameter.data.mul_(1 + 1e-6)
    assert not held(parameter, given)
    parameter.data = torch.empty(0)
    assert not held(parameter, given)
    parameter.data = torch.full((6, 8), float("nan"))
    assert held(parameter, torch.full((6, 8), float("nan")))


def test_only_the_part_that_belongs_to_a_place_is_compared() -> None:
    given = torch.arange(12.0).view(6, 2)
    parameter = nn.Parameter(torch.zeros(5, 2))
    place = Place("w", ((0, 1, 3),), ((0, 2, 3),))  # rows 2 to 5 of what was given are rows 1 to 4 here
    assert not held(parameter, given, place)
    parameter.data[1:4] = given[2:5]
    assert held(parameter, given, place)
    parameter.data[0] = 7
    assert held(parameter, given, place)
    parameter.data[3, 1] += 1e-3
    assert not held(parameter, given, place)
    stacked = nn.Parameter(torch.stack([torch.zeros(3, 2), given[2:5]]))  # the second of two experts
    assert held(stacked, given, Place("w", ((0, 1, 1),), ((0, 2, 3),)))
    assert not held(stacked, given, Place("w", ((0, 0, 1),), ((0, 2, 3),)))


def test_a_matrix_may_be_kept_transposed_and_a_convolution_flat() -> None:
    square, wide, kernel = torch.randn(4, 4), torch.randn(3, 5), torch.randn(6, 3, 2, 2)
    assert held(nn.Parameter(square.T.clone()), square)
    assert not held(nn.Parameter(square.T.roll(1, 0).clone()), square)
    assert held(nn.Parameter(wide.T.clone()), wide)
    assert not held(nn.Parameter(wide.T.roll(1, 0).clone()), wide)
    assert held(nn.Parameter(kernel.flatten(1)), kernel)
    assert not held(nn.Parameter(kernel.flatten(1).roll(1, 0)), kernel)


def test_samples_meet_every_column_of_a_matrix_and_every_value_of_a_small_one() -> None:
    _, columns = sampled_indices((64, 8))
    assert set(columns.tolist()) == set(range(8))
    (places,) = sampled_indices((3,))
    assert sorted(places.tolist()) == [0, 1, 2]
    rows, columns = sampled_indices((9, 5), ((0, 4, 2), (1, 3, 1)))
    assert sorted(zip(rows.tolist(), columns.tolist(), strict=True)) == [(4, 3), (5, 3)]


def test_few_values_are_from_all_over_a_vector_or_a_matrix() -> None:
    # 32 values: every third of 96; of [64, 40], each 64 // 32 = 2 rows down and 40 // 32 = 1 column to the right.
    matrix, vector = few_values(torch.arange(64 * 40).view(64, 40)), few_values(torch.arange(96))
    assert matrix is not None
    assert vector is not None
    assert matrix.tolist() == [81 * place for place in range(32)]
    assert vector.tolist() == [3 * place for place in range(32)]


# ---- The proof that what reaches an engine is what the trainer has


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
    rows = [("a", WEIGHTS["a"][[0, 2, 1]]), *good[1:]]
    assert problems(rows) == "a differs from the trainer's."
    assert problems([("a", WEIGHTS["a"].T.contiguous()), *good[1:]]) == "a differs from the trainer's."


def test_a_tensor_in_the_trainers_own_memory_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    swapped = WeightProof(WEIGHTS)
    list(swapped.watched([("a", WEIGHTS["b"]), *list(WEIGHTS.items())[1:]]))
    with pytest.raises(WeightSyncError, match="a differs from the trainer's.$"):
        swapped.finish(1)
    copied = WeightProof(WEIGHTS)
    list(copied.watched([(name, tensor.clone()) for name, tensor in WEIGHTS.items()]))
    copied.finish(1)
    monkeypatch.setattr(Sums, "add", None)
    proof = WeightProof(WEIGHTS)
    list(proof.watched((name, tensor.view(3, 4)) for name, tensor in WEIGHTS.items()))
    proof.finish(1)
    view = WeightProof(WEIGHTS)
    with pytest.raises(TypeError):
        list(view.watched([("a", WEIGHTS["a"].view(4, 3))]))  # of the same memory in another form: it is read


def test_weights_in_the_engines_own_memory_are_known_by_place_and_by_value(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = torch.cat([tensor.flatten() for tensor in (WEIGHTS["a"], WEIGHTS["a"] + 1)])
    places = {"a": memory[:12].view(3, 4), "b": memory[12:].view(3, 4)}
    known = {name: Placed(fingerprint(place), place) for name, place in places.items()}
    swapped = WeightProof(known)
    for name, tensor in swapped.watched([("a", places["b"]), ("b", places["a"])]):
        places[name].copy_(tensor)  # as an engine does, so that "b" is given what it had
    with pytest.raises(WeightSyncError, match=r"failed: a differs from the trainer's; b differs from the trainer's\.$"):
        swapped.finish(1)
    changed = WeightProof(known)
    list(changed.watched([("a", places["a"] * 1.01), ("b", places["b"])]))
    with pytest.raises(WeightSyncError, match=r"failed: a differs from the trainer's\.$"):
        changed.finish(1)
    monkeypatch.setattr(Sums, "add", None)
    proof = WeightProof(known)
    list(proof.watched(places.items()))
    proof.finish(1)


def test_a_copy_that_changes_is_named() -> None:
    for shape in ((64, 40), (96,), (64, 14), (64, 7), (2, 3, 4)):  # the last two cannot be looked at in the fast way
        given, parameter = torch.randn(shape), nn.Parameter(torch.zeros(shape))
        account = WeightAccount({"w": shape})
        account.accept("w", given)
        account.remember_copy("w", given, parameter)
        assert account.problems() == ["the engine does not hold w as it was given"]
        parameter.data.copy_(given)
        assert account.problems() == []
        parameter.data.fill_(float("nan"))
        account.remember_copy("w", parameter.detach(), parameter)
        assert len(account.problems()) == 1  # not as it was given first
        parameter.data = torch.empty(0)
        assert len(account.problems()) == 1


def test_without_expectations_bytes_are_counted_only() -> None:
    proof = WeightProof(None)
    list(proof.watched([("x", torch.zeros(5)), ("x", torch.zeros(5))]))
    proof.finish(0)
    assert proof.num_bytes == 40


def test_a_long_list_of_lost_weights_is_cut() -> None:
    proof = WeightProof({f"w{place}": fingerprint(torch.zeros(1)) for place in range(30)})
    list(proof.watched([]))
    with pytest.raises(WeightSyncError, match="missing w9; .*and 10 more"):
        proof.finish(1)


# ---- The proof that all ranks send the same


class TwoRanks(Comm):
    """Reduces with what another rank has given."""

    def __init__(self, other: torch.Tensor | None = None) -> None:
        super().__init__()
        self.world, self._other, self.given = 2, other, None

    def all_reduce(self, data: Any, op: str = "mean", weight: Any = None) -> Any:
        self.given = data
        return torch.maximum(data, data if self._other is None else self._other)


def test_tensors_that_differ_between_ranks_are_named() -> None:
    def given(weights: dict[str, torch.Tensor], other: torch.Tensor | None = None) -> tuple[list[str], Any]:
        agreement = RankAgreement(comm := TwoRanks(other), expected)
        assert list(agreement.watched(weights.items())) == list(weights.items())
        return agreement.problems(), comm.given

    expected = {**WEIGHTS, "gathered": fingerprint(WEIGHTS["a"])}
    problems, theirs = given({**WEIGHTS, "gathered": WEIGHTS["a"]})
    assert problems == []
    sums = [fingerprint(item).total for item in WEIGHTS.values()]
    assert theirs.tolist() == [sums, [~total for total in sums]]
    assert given(WEIGHTS, theirs)[0] == []
    for sign in (1, -1):  # whichever is larger
        changed = {**WEIGHTS, "b": WEIGHTS["b"] + sign}
        assert given(changed, theirs)[0] == ["b differs between the ranks"]
    assert given({name: item for name, item in WEIGHTS.items() if name != "c"}, theirs)[0][0].startswith("c differs")
    assert RankAgreement(TwoRanks(), {"a": expected["gathered"]}).problems() == []


class Gathering(Comm):
    """Rank 0, which gathers the same function of its own item and of the names of other ranks."""

    def __init__(self, *others: Any) -> None:
        super().__init__()
        self._others, self._gathers_names = others, False

    def all_gather_object(self, item: Any, group: Any = None) -> list[Any]:
        if not self._gathers_names:
            self._gathers_names = True
            return [item, *(zlib.crc32(repr(other).encode()) for other in self._others)]
        return [item, *self._others]


def test_ranks_with_fingerprints_of_other_weights_are_named() -> None:
    require_same_names(Gathering(["a", "b"], ["a", "b"]), {"a": 1, "b": 2})
    require_same_names(Gathering(None), None)
    with pytest.raises(ValueError, match=r"Rank 0 has 2, and rank 2 has none\.$"):
        require_same_names(Gathering(["a", "b"], None), ["a", "b"])
    with pytest.raises(ValueError, match=r"Rank 0 has 2, and rank 1 has 1\. The first difference is b in place of a"):
        require_same_names(Gathering(["b"]), ["a", "b"])
    with pytest.raises(ValueError, match=r"rank 1 has 1\. The first difference is nothing in place of b\.$"):
        require_same_names(Gathering(["a"]), ["a", "b"])
