"""Lays scored samples end to end without padding, and cuts a step into micro-batches.

The only place that knows the off-by-one: the hidden state at place p predicts the token at place p + 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate, chain
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from lightrl.models.multimodal import join_vision, pack_positions
from lightrl.records import EncodedPrompt, Experience, PackedBatch, Prompt, Sample


class Packable(Protocol):
    """What goes into one micro-batch as a whole: a sample, or an example with all its answers."""

    @property
    def num_tokens(self) -> int: ...

    @property
    def key(self) -> Key: ...

    @property
    def label(self) -> str: ...


_T = TypeVar("_T")
_Item = TypeVar("_Item", bound=Packable)
Key = tuple[int, int]  # (prompt position, sample index): names a sample on any world size
TokenValues = Mapping[Key, Sequence[float]]  # one value per response token
TokenMasks = Mapping[Key, Sequence[bool]]

DUMMY_KEY: Key = (-1, -1)
_SORTED_CUTS_MAY_EXCEED = 1.05  # how much worse a balance we take for having similar lengths together


def sample_key(sample: Sample) -> Key:
    """The name of a sample, equal on every rank and for every world size."""
    return (sample.position, sample.sample_index)


def pack(
    experiences: Sequence[Experience],
    *,
    temperature: float,
    old_logprobs: TokenValues | None,
    ref_logprobs: TokenValues | None,
    advantages: TokenValues | None = None,
    old_values: TokenValues | None = None,
    returns: TokenValues | None = None,
    loss_masks: TokenMasks | None = None,
    teacher_logprobs: TokenValues | None = None,
    selected: TokenMasks | None = None,
    in_policy_loss: TokenMasks | None = None,
    encode: Callable[[Prompt], EncodedPrompt] | None = None,
) -> PackedBatch:
    """One micro-batch of samples as one row of tokens, shortest first, equal lengths adjacent.

    Args:
        temperature: what the tokens were sampled at.
        old_logprobs: per sample, of the policy before the update; None where it is not needed.
        ref_logprobs: per sample, of the frozen reference; None where it is not needed.
        advantages: per sample, one for each response token; None gives them all that of the sample.
        old_values, returns: per sample, for a critic: its values before the update, and what it is trained towards.
        loss_masks: per sample, True for each response token to train; None trains those of all samples to be trained.
        teacher_logprobs: per sample, of the teacher that is distilled; None where there is none.
        selected: per sample, True for each response token that the loss treats apart; None where it treats none so.
        in_policy_loss: per sample, True for each token whose policy loss counts; None counts all that are trained.
        encode: prompts as a vision-language model takes them; None for a model of text alone.
    """
    if not experiences:
        raise ValueError("There is no sample to pack: use dummy_batch() on a rank that has none.")
    ordered = sorted(experiences, key=lambda item: (item.num_tokens, sample_key(item.sample)))
    samples = [item.sample for item in ordered]
    _check_samples(samples)
    lengths = [item.num_tokens for item in ordered]
    num_scored = [len(sample.response_ids) for sample in samples]
    cu_seqlens = (0, *accumulate(lengths))
    owners = torch.arange(len(samples)).repeat_interleave(torch.tensor(num_scored))
    encoded = _encoded(samples, encode)
    return PackedBatch(
        input_ids=torch.tensor(_concatenated((*s.prompt_ids, *s.response_ids) for s in samples)),
        position_ids=pack_positions(lengths, encoded),
        cu_seqlens=cu_seqlens,
        score_index=torch.tensor(_score_places(cu_seqlens, num_scored), dtype=torch.int64),
        targets=torch.tensor(_concatenated(s.response_ids for s in samples), dtype=torch.int64),
        sequence_index=owners,
        loss_mask=_loss_mask(ordered, owners, loss_masks),
        advantages=_advantages(ordered, owners, advantages),
        sampler_logprobs=torch.tensor(_concatenated(s.sampler_logprobs for s in samples), dtype=torch.float32),
        old_logprobs=_token_values(samples, old_logprobs, "old_logprobs"),
        ref_logprobs=_token_values(samples, ref_logprobs, "ref_logprobs"),
        old_values=_token_values(samples, old_values, "old_values"),
        returns=_token_values(samples, returns, "returns"),
        temperature=temperature,
        keys=tuple(sample_key(sample) for sample in samples),
        vision=join_vision(encoded, cu_seqlens[:-1]) if encoded is not None else None,
        teacher_logprobs=_token_values(samples, teacher_logprobs, "teacher_logprobs"),
        selected=_token_masks(samples, selected, "selected"),
        in_policy_loss=_token_masks(samples, in_policy_loss, "in_policy_loss"),
    )


def dummy_batch(*, temperature: float) -> PackedBatch:
    """Two tokens that train nothing, for a rank that has no sample but must run forward and backward like the rest."""
    zero = torch.zeros(1)
    return PackedBatch(
        input_ids=torch.zeros(2, dtype=torch.int64),
        position_ids=torch.arange(2),
        cu_seqlens=(0, 2),
        score_index=torch.zeros(1, dtype=torch.int64),
        targets=torch.zeros(1, dtype=torch.int64),
        sequence_index=torch.zeros(1, dtype=torch.int64),
        loss_mask=torch.zeros(1, dtype=torch.bool),
        advantages=zero,
        sampler_logprobs=zero,
        old_logprobs=zero,
        ref_logprobs=zero,
        old_values=zero,
        returns=zero,
        temperature=temperature,
        keys=(DUMMY_KEY,),
        teacher_logprobs=zero,
        selected=torch.zeros(1, dtype=torch.bool),
        in_policy_loss=torch.zeros(1, dtype=torch.bool),
    )


def unpack(batch: PackedBatch, values: Tensor) -> dict[Key, Tensor]:
    """Cuts values, [N] one per response token, into one piece per sample."""
    if values.shape[0] != batch.targets.shape[0]:
        raise ValueError(
            f"unpack got {values.shape[0]} values for {batch.targets.shape[0]} response tokens: give one per token."
        )
    counts = torch.bincount(batch.sequence_index, minlength=len(batch.keys)).tolist()
    return dict(zip(batch.keys, values.split(counts), strict=True))


def split_micro_batches(
    items: Sequence[_Item], *, max_tokens: int | None, max_samples: int | None, min_num: int = 1
) -> list[list[_Item]]:
    """Cuts samples into as few micro-batches as the limits allow, of like size, largest first.

    The result depends on the set of samples, not on their order. It has at least min_num entries, so that ranks can
    agree on a number; where there are fewer samples than that, the last entries are empty.

    Args:
        max_tokens: prompt and response tokens of a micro-batch; None is no limit.
        max_samples: samples of a micro-batch; None is no limit.
    """
    _check_limits(items, max_tokens, max_samples)
    ordered = sorted(items, key=lambda item: (-item.num_tokens, item.key))
    fewest = _first_fit(ordered, max_tokens, max_samples)
    num = max(min(min_num, len(ordered)), len(fewest))
    if num == min_num == 1:
        return fewest

    def fits(batches: list[list[_Item]]) -> bool:
        return all(_fits(batch, max_tokens, max_samples) for batch in batches)

    candidates = [_halved_until(fewest, num)]
    balanced = _balanced(ordered, num)
    if fits(balanced):
        candidates.append(balanced)
    best = min(candidates, key=_largest_load)
    sorted_cuts = _cut_in_order(ordered, num)
    if fits(sorted_cuts) and _largest_load(sorted_cuts) <= _SORTED_CUTS_MAY_EXCEED * _largest_load(best):
        best = sorted_cuts
    best = sorted(best, key=_num_tokens, reverse=True)
    return best + [[] for _ in range(min_num - len(best))]


def _concatenated(parts: Iterable[Iterable[_T]]) -> list[_T]:
    return list(chain.from_iterable(parts))


def _score_places(cu_seqlens: tuple[int, ...], num_scored: list[int]) -> list[int]:
    """Places whose hidden states predict the response: one before each of the last tokens of every sequence."""
    return _concatenated(range(end - 1 - count, end - 1) for end, count in zip(cu_seqlens[1:], num_scored, strict=True))


def _check_samples(samples: list[Sample]) -> None:
    seen: set[Key] = set()
    for sample in samples:
        key = sample_key(sample)
        if key in seen:
            raise ValueError(f"Two samples have the key {key}: position and sample_index must name a sample.")
        seen.add(key)
        if not sample.prompt_ids:
            raise ValueError(
                f"Prompt {sample.prompt.index} has no tokens: nothing predicts its first response token. "
                "Begin the prompt with at least one token, such as the beginning-of-text token."
            )


def _encoded(samples: list[Sample], encode: Callable[[Prompt], EncodedPrompt] | None) -> list[EncodedPrompt] | None:
    """Each sample's prompt, proven to be what its engine saw; the samples of a prompt share one."""
    if encode is None:
        for sample in samples:
            if sample.prompt.images or sample.prompt.videos:
                raise ValueError(
                    f"Prompt {sample.prompt.index} has images or videos: they need an encoder to be packed."
                )
        return None
    by_index = {sample.prompt.index: sample.prompt for sample in samples}
    found = {index: encode(prompt) for index, prompt in by_index.items()}
    for sample in samples:
        ours, seen = found[sample.prompt.index].token_ids, sample.prompt_ids
        if ours != seen:
            place = next((i for i, pair in enumerate(zip(ours, seen, strict=False)) if pair[0] != pair[1]), "the end")
            raise ValueError(
                f"Prompt {sample.prompt.index} has {len(seen)} tokens in the engine and {len(ours)} in the trainer, "
                f"unlike from place {place} on: they expand its images in different ways. Give both the same "
                "processor settings, and use files that do not change during a run."
            )
    return [found[sample.prompt.index] for sample in samples]


def _per_token(samples: list[Sample], values: TokenValues | TokenMasks, name: str) -> list[float]:
    """The values of all samples in pack order, each checked to have one per response token."""
    flat: list[float] = []
    for sample in samples:
        key = sample_key(sample)
        if key not in values:
            raise ValueError(f"{name} has nothing for sample {key}: give one value per response token of every sample.")
        if len(values[key]) != len(sample.response_ids):
            raise ValueError(
                f"{name} has {len(values[key])} values for sample {key}, whose response has "
                f"{len(sample.response_ids)} tokens: give one per response token."
            )
        flat.extend(values[key])
    return flat


def _token_values(samples: list[Sample], values: TokenValues | None, name: str) -> Tensor | None:
    return None if values is None else torch.tensor(_per_token(samples, values, name), dtype=torch.float32)


def _advantages(ordered: list[Experience], owners: Tensor, given: TokenValues | None) -> Tensor:
    found = _token_values([item.sample for item in ordered], given, "advantages")
    return torch.tensor([item.advantage for item in ordered], dtype=torch.float32)[owners] if found is None else found


def _token_masks(samples: list[Sample], masks: TokenMasks | None, name: str) -> Tensor | None:
    return None if masks is None else torch.tensor(_per_token(samples, masks, name), dtype=torch.bool)


def _loss_mask(ordered: list[Experience], owners: Tensor, masks: TokenMasks | None) -> Tensor:
    given = _token_masks([item.sample for item in ordered], masks, "loss_masks")
    trained = torch.tensor([item.is_trained for item in ordered])[owners]
    return trained if given is None else trained & given


def _check_limits(items: Sequence[_Item], max_tokens: int | None, max_samples: int | None) -> None:
    if max_samples is not None and max_samples < 1:
        raise ValueError(f"max_samples is {max_samples}: it must be at least 1, or None for no limit.")
    if max_tokens is None:
        return
    for item in items:
        if item.num_tokens > max_tokens:
            raise ValueError(
                f"{item.label} has {item.num_tokens} tokens (prompt and response), "
                f"more than a micro-batch may hold: raise --max_tokens_per_microbatch (now {max_tokens}) to at least "
                f"{item.num_tokens}, or allow shorter prompts and responses."
            )


def _num_tokens(batch: Sequence[_Item]) -> int:
    return sum(item.num_tokens for item in batch)


def _largest_load(batches: list[list[_Item]]) -> int:
    return max((_num_tokens(batch) for batch in batches), default=0)


def _fits(batch: Sequence[_Item], max_tokens: int | None, max_samples: int | None) -> bool:
    has_room = max_tokens is None or _num_tokens(batch) <= max_tokens
    return has_room and (max_samples is None or len(batch) <= max_samples)


def _first_fit(ordered: list[_Item], max_tokens: int | None, max_samples: int | None) -> list[list[_Item]]:
    """First-fit decreasing: near the fewest bins that hold everything."""
    batches: list[list[_Item]] = []
    loads: list[int] = []
    for item in ordered:
        for place, batch in enumerate(batches):
            has_room = max_tokens is None or loads[place] + item.num_tokens <= max_tokens
            if has_room and (max_samples is None or len(batch) < max_samples):
                batch.append(item)
                loads[place] += item.num_tokens
                break
        else:
            batches.append([item])
            loads.append(item.num_tokens)
    return batches


def _halved_until(batches: list[list[_Item]], num: int) -> list[list[_Item]]:
    """Splits the largest batch that can be split until there are num of them; the parts keep within any limit."""
    parts = list(batches)
    while len(parts) < num:
        place = max((i for i, part in enumerate(parts) if len(part) > 1), key=lambda i: (_num_tokens(parts[i]), -i))
        whole = parts.pop(place)
        parts += [whole[0::2], whole[1::2]]
    return parts


def _balanced(ordered: list[_Item], num: int) -> list[list[_Item]]:
    """Longest first, each to the batch with the fewest tokens."""
    batches: list[list[_Item]] = [[] for _ in range(num)]
    loads = [0] * num
    for item in ordered:
        place = min(range(num), key=lambda i: (loads[i], len(batches[i]), i))
        batches[place].append(item)
        loads[place] += item.num_tokens
    return batches


def _cut_in_order(ordered: list[_Item], num: int) -> list[list[_Item]]:
    """Cuts the samples, sorted by length, at num - 1 places as near as can be to equal shares of the tokens."""
    batches: list[list[_Item]] = []
    start, tokens_left = 0, _num_tokens(ordered)
    for batches_left in range(num, 0, -1):
        last_start = len(ordered) - batches_left + 1  # leaves one sample to each of the others
        share, load, stop = tokens_left / batches_left, 0, start
        while stop < last_start and (stop == start or load + ordered[stop].num_tokens / 2 <= share):
            load += ordered[stop].num_tokens
            stop += 1
        stop = len(ordered) if batches_left == 1 else stop
        batches.append(ordered[start:stop])
        start, tokens_left = stop, tokens_left - load
    return batches
