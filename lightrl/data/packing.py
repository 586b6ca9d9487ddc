"""Lays scored samples end to end without padding, and cuts a step into micro-batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Protocol, TypedDict, TypeVar

import torch
from torch import Tensor

from lightrl.data.expert_routing import join_routing
from lightrl.models.policy import response_batch
from lightrl.records import EncodedPrompt, Experience, PackedBatch, Prompt, Sample

if TYPE_CHECKING:
    from typing_extensions import Unpack


class Packable(Protocol):
    """A unit that must not be split over micro-batches: a sample, or an example with all its answers."""

    @property
    def num_tokens(self) -> int:
        """Number of tokens that it takes up in a pack."""
        ...

    @property
    def key(self) -> Key:
        """Its name, which is the same at any world size."""
        ...

    @property
    def label(self) -> str:
        """The subject of a message about it."""
        ...


class Encoder(Protocol):
    """Encodes the images and the tokens of samples for a vision-language model: PromptEncoder."""

    def __call__(self, prompt: Prompt) -> EncodedPrompt:
        """Encodes a prompt of the data set."""
        ...

    def episode(self, sample: Sample) -> EncodedPrompt:
        """Encodes a whole sample, whose episode may have shown images of its own."""
        ...

    def is_apart(self, sample: Sample) -> bool:
        """Returns whether a sample shows none of the images of its prompt in the data set."""
        ...


_Item = TypeVar("_Item", bound=Packable)
Key = tuple[int, int]  # (prompt position, sample index): names a sample at any world size
TokenValues = Mapping[Key, Sequence[float]]  # one value per response token
TokenMasks = Mapping[Key, Sequence[bool]]

DUMMY_KEY: Key = (-1, -1)
_MASKS = ("loss_mask", "selected", "in_policy_loss")
_SORTED_CUTS_MAY_EXCEED = 1.05  # largest load over the best one that is accepted to keep similar lengths together


class TokenColumns(TypedDict, total=False):
    """Values per response token that pack() accepts, named as in PackedBatch; None is the same as leaving one out."""

    old_logprobs: TokenValues | None  # of the policy before the update
    proximal_share: TokenValues | None  # of the updated policy, if old logprobs are interpolated
    ref_logprobs: TokenValues | None  # of the frozen reference
    advantages: TokenValues | None  # None gives every token the advantage of its sample
    old_values: TokenValues | None  # of the critic before the update
    returns: TokenValues | None  # what the critic is trained towards
    loss_mask: TokenMasks | None  # True for each token to train; None trains what the policy chose in trained samples
    teacher_logprobs: TokenValues | None  # of the teacher that the policy learns from
    selected: TokenMasks | None  # True for each token that the loss treats differently
    in_policy_loss: TokenMasks | None  # True for each token whose policy loss counts; None counts all that are trained


def pack(
    experiences: Sequence[Experience],
    *,
    temperature: float,
    encode: Encoder | None = None,
    **columns: Unpack[TokenColumns],
) -> PackedBatch:
    """Lays the samples of a micro-batch end to end, shortest first, with equal lengths adjacent.

    Args:
        temperature: the temperature at which the tokens were sampled.
        encode: encodes prompts for a vision-language model; None for a text-only model.
        columns: values per response token, by the names of TokenColumns.
    """
    if not experiences:
        raise ValueError("There is no sample to pack: use dummy_batch() on a rank that has none.")
    ordered = sorted(experiences, key=lambda item: (item.num_tokens, item.key))
    samples = [item.sample for item in ordered]
    _check_samples(samples, takes_images=encode is not None)
    pairs, keys = [(item.prompt_ids, item.response_ids) for item in samples], [item.key for item in samples]
    batch = response_batch(pairs, temperature, None if encode is None else _encoded(samples, encode), keys)
    owner = batch.sequence_index
    given = {name: _per_token(samples, column, name) for name, column in columns.items() if column is not None}
    trained = torch.tensor([item.is_trained for item in ordered])[owner]
    if any(item.sample.own or item.min_version for item in ordered):
        trained = torch.tensor([is_trained for item in ordered for is_trained in item.trained_tokens])
    tensors: dict[str, Any] = {
        "advantages": torch.tensor([item.advantage for item in ordered], dtype=torch.float32)[owner],
        "sampler_logprobs": torch.tensor([p for s in samples for p in s.sampler_logprobs], dtype=torch.float32),
        "versions": torch.tensor([version for s in samples for version in s.versions]),
        "loss_mask": trained & given.pop("loss_mask") if "loss_mask" in given else trained,
    }
    if any(sample.routing is not None or sample.allowed is not None for sample in samples):
        tensors |= _engine_choices(samples)
    return replace(batch, **(tensors | given))


def _engine_choices(samples: Sequence[Sample]) -> dict[str, Tensor]:
    """Returns the columns for the engine's choices besides tokens: experts, and the tokens left to draw from."""
    choices = {}
    if any(sample.routing is not None for sample in samples):
        choices["routing"] = join_routing(samples)
    if any(sample.allowed is not None for sample in samples):
        choices["allowed"] = _join_allowed(samples)
    return choices


def _join_allowed(samples: Sequence[Sample]) -> Tensor:
    """Returns pairs of an index among the targets and a token that could have been drawn there, [m, 2]."""
    starts = accumulate((len(sample.response_ids) for sample in samples), initial=0)
    pairs = [
        torch.from_numpy(sample.allowed) + torch.tensor([start, 0], dtype=torch.int32)
        for sample, start in zip(samples, starts, strict=False)
        if sample.allowed is not None
    ]
    return torch.cat(pairs)


def dummy_batch(*, temperature: float) -> PackedBatch:
    """Returns two untrained tokens for a rank without samples, because it must run forward and backward, too."""
    zero, none = torch.zeros(1), torch.zeros(1, dtype=torch.bool)
    values: dict[str, Any] = dict.fromkeys(
        ("old_logprobs", "proximal_share", "ref_logprobs", "old_values", "returns", "teacher_logprobs"), zero
    )
    batch = response_batch([((0,), (0,))], temperature, keys=[DUMMY_KEY])
    return replace(batch, **values, selected=none, in_policy_loss=none)


def unpack(batch: PackedBatch, values: Tensor) -> dict[Key, Tensor]:
    """Cuts values, [N] one per response token, into one piece per sample."""
    if values.shape[0] != batch.targets.shape[0]:
        raise ValueError(
            f"unpack got {values.shape[0]} values for {batch.targets.shape[0]} response tokens: give one per token."
        )
    counts = torch.bincount(batch.sequence_index, minlength=len(batch.keys)).tolist()
    return dict(zip(batch.keys, values.split(counts), strict=True))


def _check_samples(samples: Sequence[Sample], *, takes_images: bool) -> None:
    are_different = len({item.key for item in samples}) == len(samples)
    has_media = any(item.prompt.images or item.prompt.videos for item in samples)
    if not are_different or not all(item.prompt_ids for item in samples) or (has_media and not takes_images):
        raise _cannot_pack(samples)


def _cannot_pack(samples: Sequence[Sample]) -> ValueError:
    seen: set[Key] = set()
    for sample in samples:
        if sample.key in seen:
            return ValueError(f"Two samples have the key {sample.key}: position and sample_index must name a sample.")
        if not sample.prompt_ids:
            return ValueError(
                f"Prompt {sample.prompt.index} has no tokens: nothing predicts its first response token. "
                "Begin the prompt with at least one token, such as the beginning-of-text token."
            )
        seen.add(sample.key)
    index = next(item.prompt.index for item in samples if item.prompt.images or item.prompt.videos)
    return ValueError(f"Prompt {index} has images or videos: they need an encoder to be packed.")


def _encoded(samples: Sequence[Sample], encode: Encoder) -> list[EncodedPrompt]:
    """Encodes each prompt once, and checks that its tokens are those that the engine saw.

    An episode with images of its own is encoded as a whole, as is one whose prompt is not that of the data set.
    """
    prompts = {sample.prompt.index: sample.prompt for sample in samples}
    encoded = {index: encode(prompt) for index, prompt in prompts.items()}
    found: list[EncodedPrompt] = []
    for sample in samples:
        prompt = encoded[sample.prompt.index]
        ours, theirs = prompt.token_ids, sample.prompt_ids
        is_own = ours != theirs and (
            prompt.pixel_values is None or theirs[: len(ours)] == ours or encode.is_apart(sample)
        )
        if ours != theirs and not is_own:
            differs = (f"index {i}" for i, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1])
            raise ValueError(
                f"Prompt {sample.prompt.index} has {len(theirs)} tokens in the engine and {len(ours)} in the trainer, "
                f"different from {next(differs, 'the end')} on: they expand its images in different ways. Give "
                "both the same processor settings, and use files that do not change during a run."
            )
        found.append(encode.episode(sample) if sample.images or is_own else prompt)
    return found


def _per_token(samples: Sequence[Sample], column: Any, name: str) -> Tensor:
    """Returns the values of all samples in the order of the pack, float32 or bool."""
    values: list[float] = []
    for sample in samples:
        given = column.get(sample.key)
        if given is None or len(given) != len(sample.response_ids):
            raise ValueError(
                f"{name} has {'nothing' if given is None else f'{len(given)} values'} for sample {sample.key}, whose "
                f"response has {len(sample.response_ids)} tokens: give one value per response token."
            )
        values.extend(given)
    return torch.tensor(values, dtype=torch.bool if name in _MASKS else torch.float32)


# ---- Micro-batches -----------------------------------------------------------------------------------------------


def split_micro_batches(
    items: Sequence[_Item], *, max_tokens: int | None, max_samples: int | None, min_num: int = 1
) -> list[list[_Item]]:
    """Divides samples into as few micro-batches as the limits allow, of similar size, largest first.

    The result depends on the set of samples, not on their order. It has at least min_num entries, so that ranks can
    agree on a number; if there are fewer samples than that, the last entries are empty.

    Args:
        max_tokens: largest number of prompt and response tokens in a micro-batch; None: no limit.
        max_samples: largest number of samples in a micro-batch; None: no limit.
    """
    ordered = sorted(items, key=lambda item: (-item.num_tokens, item.key))
    if min_num == 1 and _fits(ordered, max_tokens, max_samples):
        return [ordered]
    _check_limits(ordered, max_tokens, max_samples)
    fewest = _first_fit(ordered, max_tokens, max_samples)
    num = max(min(min_num, len(ordered)), len(fewest))
    best = sorted(_evenest(ordered, fewest, num, max_tokens, max_samples), key=_num_tokens, reverse=True)
    return best + [[] for _ in range(min_num - len(best))]


def _evenest(
    ordered: list[_Item], fewest: list[list[_Item]], num: int, max_tokens: int | None, max_samples: int | None
) -> list[list[_Item]]:
    """Returns num micro-batches of similar size that keep similar lengths together if that costs little."""

    def fits(batches: list[list[_Item]]) -> bool:
        return all(_fits(batch, max_tokens, max_samples) for batch in batches)

    candidates = [_halved_until(fewest, num)]
    balanced = _balanced(ordered, num)
    if fits(balanced):
        candidates.append(balanced)
    best = min(candidates, key=_largest_load)
    sorted_cuts = _cut_in_order(ordered, num)
    is_even = fits(sorted_cuts) and _largest_load(sorted_cuts) <= _SORTED_CUTS_MAY_EXCEED * _largest_load(best)
    return sorted_cuts if is_even else best


def _check_limits(items: Sequence[_Item], max_tokens: int | None, max_samples: int | None) -> None:
    if max_samples is not None and max_samples < 1:
        raise ValueError(f"max_samples is {max_samples}: it must be at least 1, or None for no limit.")
    for item in items:
        if max_tokens is not None and item.num_tokens > max_tokens:
            raise _too_long(item, max_tokens)


def _too_long(item: Packable, max_tokens: int) -> ValueError:
    return ValueError(
        f"{item.label} has {item.num_tokens} tokens (prompt and response), more than a micro-batch may hold: raise "
        f"--max_tokens_per_microbatch (now {max_tokens}) to at least {item.num_tokens}, or allow shorter prompts and "
        "responses."
    )


def _num_tokens(batch: Sequence[_Item]) -> int:
    return sum(item.num_tokens for item in batch)


def _largest_load(batches: list[list[_Item]]) -> int:
    return max((_num_tokens(batch) for batch in batches), default=0)


def _fits(batch: Sequence[_Item], max_tokens: int | None, max_samples: int | None) -> bool:
    has_room = max_tokens is None or _num_tokens(batch) <= max_tokens
    return has_room and (max_samples is None or len(batch) <= max_samples)


def _first_fit(ordered: list[_Item], max_tokens: int | None, max_samples: int | None) -> list[list[_Item]]:
    """Fills micro-batches by first-fit decreasing, which needs few more than the minimum."""
    batches: list[list[_Item]] = []
    loads: list[int] = []
    for item in ordered:
        for index, batch in enumerate(batches):
            has_room = max_tokens is None or loads[index] + item.num_tokens <= max_tokens
            if has_room and (max_samples is None or len(batch) < max_samples):
                batch.append(item)
                loads[index] += item.num_tokens
                break
        else:
            batches.append([item])
            loads.append(item.num_tokens)
    return batches


def _halved_until(batches: list[list[_Item]], num: int) -> list[list[_Item]]:
    """Splits the largest batch repeatedly until there are num batches; halves stay within any limit."""
    parts = list(batches)
    while len(parts) < num:
        largest = max((i for i, part in enumerate(parts) if len(part) > 1), key=lambda i: (_num_tokens(parts[i]), -i))
        whole = parts.pop(largest)
        parts += [whole[0::2], whole[1::2]]
    return parts


def _balanced(ordered: list[_Item], num: int) -> list[list[_Item]]:
    """Adds each sample, longest first, to the batch with the fewest tokens."""
    batches: list[list[_Item]] = [[] for _ in range(num)]
    loads = [0] * num
    for item in ordered:
        lightest = min(range(num), key=lambda i: (loads[i], len(batches[i]), i))
        batches[lightest].append(item)
        loads[lightest] += item.num_tokens
    return batches


def _cut_in_order(ordered: list[_Item], num: int) -> list[list[_Item]]:
    """Cuts the samples, sorted by length, into num runs with as equal token counts as the cuts allow."""
    batches: list[list[_Item]] = []
    start, tokens_left = 0, _num_tokens(ordered)
    for batches_left in range(num, 0, -1):
        last_start = len(ordered) - batches_left + 1  # leaves at least one sample for each of the others
        fair_load, load, stop = tokens_left / batches_left, 0, start
        while stop < last_start and (stop == start or load + ordered[stop].num_tokens / 2 <= fair_load):
            load += ordered[stop].num_tokens
            stop += 1
        stop = len(ordered) if batches_left == 1 else stop
        batches.append(ordered[start:stop])
        start, tokens_left = stop, tokens_left - load
    return batches
