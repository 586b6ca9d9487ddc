"""Episodes as dicts of tensors: the form of the seed's workflow, and mistakes that it is easy to make."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from lightrl.rollout.episode import Turn
from lightrl.rollout.episode_tensors import episode_of_tensors


def tensors(**changes: Any) -> dict[str, torch.Tensor]:
    given = {
        "input_ids": [2, 3, 5, 6, 7],
        "loss_mask": [0, 0, 1, 0, 1],
        "logprobs": [0.0, 0.0, -1.0, 0.0, -2.0],
        "versions": [-1, -1, 3, -1, 4],
        "rewards": [0.5],
        **changes,
    }
    return {name: torch.tensor([values]) for name, values in given.items() if values is not None}


def turn(prompt: tuple[int, ...], *ids: int, is_trainable: bool = True) -> Turn:
    count = len(ids)
    return Turn(
        prompt_ids=prompt,
        token_ids=ids,
        logprobs=tuple(-float(token) for token in ids),
        versions=(4,) * count,
        finish_reason="stop",
        text="",
        is_trainable=is_trainable,
    )


def test_tensors_are_split_at_the_first_trained_token() -> None:
    episode = episode_of_tensors(tensors())
    assert episode.prompt_ids == (2, 3)
    assert episode.response_ids == [5, 6, 7]
    assert episode.turns == [0, 2]
    assert episode.reward == 0.5
    assert episode._logprobs == [-1.0, 0.0, -2.0]


def test_a_dict_that_ends_with_a_turn_that_was_cut_off_is_cut_off() -> None:
    whole, cut = turn((2, 3), 5, 6), replace(turn((2, 3, 5, 6), 7), finish_reason="length")
    given = tensors(loss_mask=[0, 0, 1, 1, 1])
    assert episode_of_tensors(given, [whole, cut]).finish_reason == "length"
    assert episode_of_tensors(given).turns == [0]  # whatever was said without anything heard between
    heard = tensors(input_ids=[2, 3, 5, 6, 7, 8], loss_mask=[0, 0, 1, 1, 1, 0], logprobs=None, versions=None)
    assert episode_of_tensors(heard, [whole, cut]).finish_reason == "stop"  # something follows the turn
    assert episode_of_tensors(given).finish_reason == "stop"  # another engine's tokens


def test_the_form_without_logprobs_takes_them_from_the_turns() -> None:
    # input_ids, loss_mask, versions and attention_mask of [1, L], and the reward once per token, without a row.
    given = {
        "input_ids": torch.tensor([[2, 3, 5, 6, 0]]),
        "loss_mask": torch.tensor([[0, 0, 1, 1, 0]]),
        "versions": torch.tensor([[-1, -1, 4, 4, 0]]),
        "attention_mask": torch.tensor([[True, True, True, True, False]]),
        "rewards": torch.tensor([0.25] * 5),
    }
    episode = episode_of_tensors(given, [turn((2, 3), 5, 6), turn((2, 3), 9, 9, is_trainable=False)])
    assert episode.prompt_ids == (2, 3)
    assert episode.response_ids == [5, 6]
    assert episode._logprobs == [-5.0, -6.0]
    assert episode._versions == [4, 4]
    assert episode.reward == 0.25


MADE = [turn((2, 3), 5), turn((2, 3, 5, 6), 7)]


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"logprobs": [0.0]}, r"tensors of the shapes .*'logprobs': \[1, 1\].* each must be \[1, L\]"),
        ({"loss_mask": [0] * 5}, "0 trained tokens of 5: give a prompt of at least one token"),
        ({"loss_mask": [1] * 5}, "a prompt of at least one token"),
        ({"rewards": [0.5, 0.5, 0.25, 0.5, 0.5]}, "with 2 different values: give one number"),
        ({"rewards": [0.5, 0.5]}, r"rewards of the shape \[1, 2\]"),
        ({"loss_mask": [0, 1, 0, 1, 0]}, "trains token 1 .2 such tokens., which the engine did not make at that place"),
        ({"input_ids": [2, 3, 8, 6, 7]}, "trains token 2 .* text must not be tokenised again"),
        ({"versions": None}, ""),
    ],
)
def test_tensors_that_are_no_episode_are_refused(changes: dict[str, Any], text: str) -> None:
    if not text:
        assert episode_of_tensors(tensors(**changes), MADE)._versions == [4, 0, 4]
        text = "Another engine's tokens need logprobs and versions"
        with pytest.raises(ValueError, match=text):
            episode_of_tensors(tensors(**changes))
        return
    with pytest.raises(ValueError, match=text):
        episode_of_tensors(tensors(**changes), MADE)


def test_a_greedy_turn_cannot_be_trained() -> None:
    with pytest.raises(ValueError, match="did not make at that place at the run's temperature"):
        episode_of_tensors(tensors(), [turn((2, 3), 5, is_trainable=False), MADE[1]])


def test_missing_tensors_are_named() -> None:
    given = tensors()
    del given["loss_mask"], given["rewards"]
    with pytest.raises(ValueError, match="An episode as a dict has no loss_mask, rewards. It has input_ids, logprobs"):
        episode_of_tensors(given)
    with pytest.raises(ValueError, match=r"has no input_ids, loss_mask, rewards\. It has nothing\."):
        episode_of_tensors({})


def test_a_list_in_place_of_a_tensor_is_named() -> None:
    for name in ("rewards", "input_ids"):
        with pytest.raises(ValueError, match=f"An episode as a dict has {name} of the type list: give a tensor"):
            episode_of_tensors({**tensors(), name: [1.0]})
