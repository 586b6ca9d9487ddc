"""A user's dictionary is read into the right sequences, or refused with what to do."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightrl.data.token_dict import UserBatch, dummy_row, kinds_of, next_token, pack_rows, read_rows

PADDED: dict[str, Any] = {
    "input_ids": torch.tensor([[5, 6, 7, 0], [0, 8, 9, 0]]),
    "attention_mask": torch.tensor([[1, 1, 1, 0], [0, 1, 1, 0]]),  # padding on either side
    "loss_mask": torch.tensor([[0, 1, 1, 0], [0, 0, 1, 0]]),
    "reward": torch.tensor([0.5, 2.0]),
    "hints": torch.arange(16.0).view(2, 4, 2),
}
PACKED: dict[str, Any] = {
    "input_ids": torch.tensor([5, 6, 7, 8, 9]),
    "cu_seqlens": torch.tensor([0, 3, 5]),
    "loss_mask": torch.tensor([0, 1, 1, 0, 1]),
    "reward": torch.tensor([0.5, 2.0]),
    "max_seqlen": 3,
}


def test_padded_and_packed_are_the_same_sequences_in_a_pack() -> None:
    for batch in (PADDED, PACKED):
        pack = pack_rows(read_rows(UserBatch(batch)))
        # The shorter sequence goes first.
        assert pack.input_ids.tolist() == [8, 9, 5, 6, 7]
        assert pack.position_ids.tolist() == [0, 1, 0, 1, 2]
        assert pack.cu_seqlens == (0, 2, 5)
        assert pack.indices == (1, 0)
        assert pack.data["reward"].tolist() == [2.0, 0.5]
        assert pack.data["loss_mask"].tolist() == [0, 1, 0, 1, 1]
        # Row p of the logits predicts token p + 1; nothing is predicted at the end of a sequence.
        assert next_token(pack.data, "input_ids").tolist() == [9, 0, 6, 7, 0]
        assert next_token(pack.data, "loss_mask").tolist() == [1, 0, 1, 1, 0]
        assert pack.data["loss_mask"].tolist() == [0, 1, 0, 1, 1]
    pack = pack_rows(read_rows(UserBatch(PADDED)))
    # Row 1 holds 8 .. 15, in pairs; its tokens are the places 1 and 2.
    assert pack.data["hints"].tolist()[:2] == [[10.0, 11.0], [12.0, 13.0]]


def test_a_dummy_has_the_same_keys_and_no_sequence() -> None:
    kinds = kinds_of(UserBatch(PADDED))
    pack = pack_rows([dummy_row(kinds)])
    assert set(pack.data) == {*PADDED, "cu_seqlens"}
    assert pack.indices == ()
    assert pack.data["hints"].shape == (2, 2)
    assert pack.data["reward"].shape == (1,)
    assert not pack.data["loss_mask"].any()


def test_a_declared_key_wins_over_its_shape() -> None:
    square = {**PACKED, "input_ids": torch.tensor([5, 6]), "cu_seqlens": torch.tensor([0, 1, 2])}
    square["loss_mask"] = torch.tensor([0, 1])
    with pytest.raises(ValueError, match=r"'reward' of the batch has the shape \[2\].*UserBatch\(data, per_seq"):
        read_rows(UserBatch(square))
    rows = read_rows(UserBatch(square, per_sequence=["reward"]))
    assert [float(row.per_sequence["reward"]) for row in rows] == [0.5, 2.0]
    rows = read_rows(UserBatch(square, per_token=["reward"]))
    assert [row.per_token["reward"].tolist() for row in rows] == [[0.5], [2.0]]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"attention_mask": None}, r"need an attention_mask of that shape, not None.*ones_like"),
        ({"attention_mask": torch.ones(2, 3)}, r"need an attention_mask of that shape, not \[2, 3\]"),
        ({"attention_mask": torch.tensor([[1, 0, 1, 0], [1, 1, 1, 1]])}, "Row 0 of attention_mask has a 0 between"),
        ({"attention_mask": torch.tensor([[1, 1, 1, 1], [0, 0, 0, 0]])}, "Row 1 of attention_mask has no 1"),
        ({"reward": torch.ones(3)}, r"'reward' of the batch has the shape \[3\]. A value per token begins with \[2, 4"),
        ({"loss_mask": torch.ones(2)}, r"'loss_mask' of the batch has the shape \[2\]"),
        ({"text": ["a", "b"]}, "'text' of the batch is no tensor"),
        ({"input_ids": None}, "needs input_ids of shape"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, Any], text: str) -> None:
    batch = {name: value for name, value in {**PADDED, **change}.items() if value is not None}
    with pytest.raises(ValueError, match=text):
        read_rows(UserBatch(batch))


@pytest.mark.parametrize("bounds", [None, [0, 3], [1, 5], [0, 3, 3, 5], [0, 4, 3, 5]])
def test_boundaries_of_a_pack_must_rise_to_its_end(bounds: list[int] | None) -> None:
    batch = {name: value for name, value in PACKED.items() if name != "cu_seqlens"}
    batch |= {} if bounds is None else {"cu_seqlens": torch.tensor(bounds)}
    with pytest.raises(ValueError, match="boundaries of the sequences that rise from 0 to 5"):
        read_rows(UserBatch(batch))


def test_declared_keys_must_exist() -> None:
    with pytest.raises(ValueError, match="name keys of the batch"):
        UserBatch(PADDED, per_token=["rewards"])
