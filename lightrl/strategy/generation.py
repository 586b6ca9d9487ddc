"""What goes into and comes out of gather_and_generate, apart from any strategy."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from easydict import EasyDict

from lightrl.engines.base import Completion, EnginePrompt, SamplingParams
from lightrl.seeding import mix_seed


class Decoder(Protocol):
    """The part of a tokenizer that turns ids to text and back."""

    def decode(self, token_ids: Any, skip_special_tokens: bool = ...) -> Any: ...

    def encode(self, text: str) -> Any: ...


def params_for_each(sampling_params: Any, num_prompts: int, first_position: int) -> list[SamplingParams]:
    """One SamplingParams per prompt. Shared ones get a seed from the prompt's place among the prompts of all ranks."""
    if isinstance(sampling_params, Sequence) and not isinstance(sampling_params, str):
        if len(sampling_params) != num_prompts:
            raise ValueError(f"{len(sampling_params)} sampling parameters for {num_prompts} prompts on this rank.")
        return [_as_params(item) for item in sampling_params]
    shared = _as_params(sampling_params)
    return [replace(shared, seed=mix_seed(shared.seed, first_position + i)) for i in range(num_prompts)]


def _as_params(given: Any) -> SamplingParams:
    if isinstance(given, SamplingParams):
        return given
    if isinstance(given, Mapping):
        renamed = {"max_new_tokens" if key == "max_tokens" else key: value for key, value in given.items()}
        try:
            return SamplingParams(**renamed)
        except TypeError as error:
            known = ", ".join(SamplingParams.__dataclass_fields__)
            raise ValueError(f"Sampling parameters {sorted(given)} are not all known. Known: {known}.") from error
    raise TypeError(f"sampling_params must be SamplingParams, a dict, or one per prompt, not {type(given).__name__}.")


def as_prompt_list(prompt_token_ids: Sequence[Any]) -> list[list[int]]:
    """Accepts one prompt (a list of ids) or several."""
    if prompt_token_ids and isinstance(prompt_token_ids[0], int):
        return [list(prompt_token_ids)]
    return [list(prompt) for prompt in prompt_token_ids]


def engine_prompts(
    inputs: Sequence[Mapping[str, Any]], tokenizer: Decoder | None, placeholder_ids: Collection[int] = ()
) -> list[EnginePrompt]:
    """What the engine is asked, from dicts of "prompt" (a text or token ids) and perhaps "multi_modal_data".

    A run of one placeholder id, as a processor leaves it in place of an image, is one placeholder again: the engine
    expands it itself and would expand each of them.
    """
    made = []
    for item in inputs:
        prompt, media = item["prompt"], item.get("multi_modal_data") or {}
        if isinstance(prompt, str):
            if tokenizer is None:
                raise ValueError("Text prompts need a tokenizer: set strategy.tokenizer, or pass prompt_token_ids.")
            prompt = tokenizer.encode(prompt)
        ids = _without_runs(prompt, placeholder_ids) if media else prompt
        made.append(
            EnginePrompt(
                token_ids=tuple(int(token) for token in ids),
                images=tuple(media.get("image", ())),
                videos=tuple(media.get("video", ())),
            )
        )
    return made


def _without_runs(ids: Sequence[int], placeholder_ids: Collection[int]) -> list[int]:
    return [
        token for place, token in enumerate(ids) if not (token in placeholder_ids and place and ids[place - 1] == token)
    ]


def as_item(completion: Completion, tokenizer: Decoder | None) -> EasyDict:
    """A completion as users of the contract read it."""
    text = tokenizer.decode(list(completion.output_token_ids), skip_special_tokens=True) if tokenizer else None
    return EasyDict(
        prompt_token_ids=list(completion.prompt_token_ids),
        output_token_ids=list(completion.output_token_ids),
        logprobs=list(completion.logprobs),
        versions=list(completion.versions),
        finish_reason=completion.finish_reason,
        sample_index=completion.sample_index,
        text=text,
    )


def build_multimodal_inputs(
    prompts: Sequence[Any],
    images: Sequence[Any] | None,
    images_num: Sequence[int] | None,
    videos: Sequence[Any] | None,
    videos_num: Sequence[int] | None,
) -> list[dict[str, Any]]:
    """One dict per prompt, a text or token ids: "prompt", and "multi_modal_data" where it has images or videos."""
    image_lists = _per_prompt(prompts, images, images_num, "image")
    video_lists = _per_prompt(prompts, videos, videos_num, "video")
    inputs = []
    for prompt, own_images, own_videos in zip(prompts, image_lists, video_lists, strict=True):
        media = {name: items for name, items in (("image", own_images), ("video", own_videos)) if items}
        inputs.append({"prompt": prompt, "multi_modal_data": media} if media else {"prompt": prompt})
    return inputs


def _per_prompt(
    prompts: Sequence[Any], items: Sequence[Any] | None, counts: Sequence[int] | None, kind: str
) -> list[list[Any]]:
    """Nested lists are taken as they are, flat ones are cut by the counts; without counts one item a prompt."""
    if items is None:
        return [[] for _ in prompts]
    is_nested = any(isinstance(item, list | tuple) for item in items)
    if counts is not None and len(counts) != len(prompts):
        raise ValueError(f"{len(counts)} {kind} counts for {len(prompts)} prompts.")
    if is_nested or (counts is None and len(items) == len(prompts)):
        nested = [list(item) if isinstance(item, list | tuple) else [] if item is None else [item] for item in items]
        if len(nested) != len(prompts):
            raise ValueError(f"{len(nested)} lists of {kind}s for {len(prompts)} prompts.")
        for place, own in enumerate(nested):
            if counts is not None and counts[place] != len(own):
                raise ValueError(f"prompt {place} has {len(own)} {kind}s, but its count says {counts[place]}.")
        return nested
    if counts is None:
        raise ValueError(f"{len(items)} {kind}s for {len(prompts)} prompts: say how many each has in {kind}s_num.")
    if sum(counts) != len(items):
        raise ValueError(f"{len(items)} {kind}s, but the counts {list(counts)} add up to {sum(counts)}.")
    ends = [sum(counts[: place + 1]) for place in range(len(counts))]
    return [list(items[end - count : end]) for end, count in zip(ends, counts, strict=True)]
