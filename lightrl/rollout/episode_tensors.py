"""Reads episodes in the form in which other frameworks return them: a dict of tensors with one row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lightrl.rollout.episode import Episode, Turn

_ROWS = ("input_ids", "loss_mask", "attention_mask", "logprobs", "versions")  # of shape [1, L]


def episode_of_tensors(tensors: Mapping[str, Any], turns: Sequence[Turn] = ()) -> Episode:
    """Reads an episode from a dict of tensors; the tokens before the first trained one are the prompt.

    Args:
        tensors: input_ids and loss_mask of shape [1, L], and rewards of [1]. attention_mask of [1, L] is 0 on padding.
            logprobs and versions of [1, L] may be left out if the engine's client generated the tokens.
        turns: The turns that the client generated. They must contain the trained tokens, after the same prompts.
    """
    rows = _rows(tensors)
    ids, mask = rows["input_ids"], [bool(value) for value in rows["loss_mask"]]
    if True not in mask or mask[0]:
        raise ValueError(
            f"An episode as a dict has {sum(mask)} trained tokens of {len(mask)}: give a prompt of at least one token, "
            "and at least one trained token."
        )
    made = _made_by(turns, ids)
    if turns or not {"logprobs", "versions"} <= rows.keys():
        _require_made(mask, made)
    first = mask.index(True)
    logprobs = rows.get("logprobs") or [made.get(index, (0.0, 0))[0] for index in range(len(ids))]
    versions = rows.get("versions") or [made.get(index, (0.0, 0))[1] for index in range(len(ids))]
    episode = Episode(ids[:first])
    for index in range(first, len(ids)):
        if mask[index] and not mask[index - 1]:
            episode.turns.append(index - first)
        span = slice(index, index + 1)
        episode._add(ids[span], mask[index], logprobs[span], versions[span])
    episode.reward = _reward(tensors["rewards"], len(tensors["input_ids"].reshape(-1)))
    last = next((turn for turn in reversed(turns) if (*turn.prompt_ids, *turn.token_ids) == tuple(ids)), None)
    if last is not None:  # whether the last turn was cut off, which a dict does not say
        episode.finish_reason = last.finish_reason
    return episode


def _rows(tensors: Mapping[str, Any]) -> dict[str, list[Any]]:
    missing = sorted({"input_ids", "loss_mask", "rewards"} - set(tensors.keys()))
    if missing:
        given = ", ".join(sorted(tensors.keys())) or "nothing"
        raise ValueError(f"An episode as a dict has no {', '.join(missing)}. It has {given}.")
    present = {name: tensors[name] for name in _ROWS if name in tensors.keys()}  # noqa: SIM118  (TensorDict)
    no_tensors = sorted(name for name in (*present, "rewards") if not hasattr(tensors[name], "reshape"))
    if no_tensors:
        name = no_tensors[0]
        raise ValueError(f"An episode as a dict has {name} of the type {type(tensors[name]).__name__}: give a tensor.")
    shapes = {name: list(tensor.shape) for name, tensor in present.items()}
    length = tensors["input_ids"].shape[-1]
    if any(shape not in ([1, length], [length]) for shape in shapes.values()):
        raise ValueError(f"An episode as a dict has tensors of the shapes {shapes}: each must be [1, L], of one L.")
    rows = {name: tensor.reshape(-1).tolist() for name, tensor in present.items()}
    attended = rows.pop("attention_mask", None)
    if attended is None or all(attended):
        return rows
    return {
        name: [value for value, is_read in zip(row, attended, strict=True) if is_read] for name, row in rows.items()
    }


def _made_by(turns: Sequence[Turn], ids: Sequence[int]) -> dict[int, tuple[float, int]]:
    """Returns the logprob and the version of each token that a trainable turn generated at that index."""
    made: dict[int, tuple[float, int]] = {}
    for turn in turns:
        first = len(turn.prompt_ids)
        together = (*turn.prompt_ids, *turn.token_ids)
        if turn.is_trainable and tuple(ids[: len(together)]) == together:
            made |= {first + i: pair for i, pair in enumerate(zip(turn.logprobs, turn.versions, strict=True))}
    return made


def _require_made(mask: Sequence[bool], made: Mapping[int, Any]) -> None:
    wrong = [index for index, is_trained in enumerate(mask) if is_trained and index not in made]
    if wrong:
        raise ValueError(
            f"loss_mask trains token {wrong[0]} ({len(wrong)} such tokens), which the engine did not make at that "
            "place at the run's temperature. loss_mask has a 1 at the place of each generated token in "
            "input_ids, not before it; and text must not be tokenised again. Another engine's "
            "tokens need logprobs and versions."
        )


def _reward(rewards: Any, length: int) -> float:
    values = rewards.reshape(-1).tolist()
    if len(values) not in (1, length) or len(set(values)) != 1:
        raise ValueError(
            f"An episode as a dict has rewards of the shape {list(rewards.shape)} with {len(set(values))} different "
            "values: give one number, of the shape [1]."
        )
    return float(values[0])
