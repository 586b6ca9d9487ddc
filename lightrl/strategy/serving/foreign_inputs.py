"""The inputs and results of gather_and_generate and engine_generate_local, as code for other trainers writes them.

Texts or token ids, nested or flat lists of images and videos, parameters as dicts, results read by attribute. lightrl's
own trainers call generate() with EnginePrompt and SamplingParams, and enter none of this.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

from easydict import EasyDict

from lightrl.engines.base import Completion, EnginePrompt
from lightrl.engines.colocated import ColocatedEngine
from lightrl.strategy.serving.colocated_serving import ColocatedServing
from lightrl.strategy.serving.foreign_params import gathered_seeds, local_seeds, params_for_each


class Decoder(Protocol):
    """The part of a tokenizer that turns token ids to text and back."""

    def decode(self, token_ids: Any, skip_special_tokens: bool = ...) -> Any: ...

    def encode(self, text: str) -> Any: ...


class Caller(Protocol):
    """What generation needs of the strategy that it is called on."""

    seed: int
    tokenizer: Decoder | None
    num_generations: int

    @property
    def serving(self) -> ColocatedServing: ...


def generate_local(
    caller: Caller, sampling_params: Any, prompt_token_ids: Any | None, multi_modal_inputs: list[dict[str, Any]] | None
) -> list[EasyDict]:
    """Runs this rank's engine on exactly one kind of input."""
    if (prompt_token_ids is None) == (multi_modal_inputs is None):
        given = "neither" if prompt_token_ids is None else "both"
        raise ValueError(f"Give prompt_token_ids or multi_modal_inputs, exactly one of them; {given} was given.")
    engine, group = caller.serving.require_engine(), caller.serving.group
    if prompt_token_ids is not None:
        inputs = [{"prompt": ids} for ids in as_prompt_list(prompt_token_ids)]
    else:
        inputs = multi_modal_inputs or []
    prompts = engine_prompts(inputs, caller.tokenizer, _placeholder_ids(engine))
    seeds = local_seeds(caller.seed, caller.num_generations, group.comm.rank // group.size)
    params = params_for_each(sampling_params, len(prompts), 0, seeds)
    caller.num_generations += 1
    return [as_item(completion, caller.tokenizer) for completion in engine.generate(prompts, params)]


def generate_gathered(
    caller: Caller,
    sampling_params: Any,
    *,
    token_ids: Any | None,
    texts: list[str] | None,
    media: tuple[Any, Any, Any, Any],
    sleep_engine: bool,
) -> list[EasyDict]:
    """Samples this rank's prompts on the engine that its group shares; a collective.

    Args:
        media: images, images_num, videos and videos_num, as build_multimodal_inputs takes them.
    """
    engine, comm = caller.serving.require_engine(), caller.serving.group.comm
    with comm.phase("generate", local=True):
        if (token_ids is None) == (texts is None):
            raise ValueError("Give all_prompt_token_ids or all_prompts, exactly one of them.")
        inputs = build_multimodal_inputs(texts if texts is not None else as_prompt_list(token_ids or []), *media)
        prompts = engine_prompts(inputs, caller.tokenizer, _placeholder_ids(engine))
    counts, calls = zip(*comm.all_gather_object((len(prompts), caller.num_generations)), strict=True)
    call = max(calls)  # a rank may have sampled more often by itself
    caller.num_generations = call + 1
    with comm.phase("generate", local=True):
        first = sum(counts[: comm.rank])
        params = params_for_each(sampling_params, len(prompts), first, gathered_seeds(caller.seed, call, first))
    completions = caller.serving.generate(prompts, params, sleep_engine=sleep_engine)
    return [as_item(completion, caller.tokenizer) for completion in completions]


def _placeholder_ids(engine: ColocatedEngine) -> set[int]:
    """Returns the token ids that stand for an image or a video in a prompt."""
    ids = (engine.engine.image_token_id, engine.engine.video_token_id)
    return {token for token in ids if token is not None}


def as_prompt_list(prompt_token_ids: Sequence[Any]) -> list[list[int]]:
    """Returns a list of prompts from one prompt (a list of token ids) or from several."""
    if prompt_token_ids and isinstance(prompt_token_ids[0], int):
        return [list(prompt_token_ids)]
    return [list(prompt) for prompt in prompt_token_ids]


def engine_prompts(
    inputs: Sequence[Mapping[str, Any]], tokenizer: Decoder | None, placeholder_ids: Collection[int] = ()
) -> list[EnginePrompt]:
    """Makes prompts for the engine from dicts of "prompt" (a text or token ids) and perhaps "multi_modal_data".

    A processor leaves a run of one placeholder id for an image. It becomes one placeholder again, since the engine
    expands each placeholder itself.
    """
    prompts = []
    for item in inputs:
        prompt, media = item["prompt"], item.get("multi_modal_data") or {}
        if isinstance(prompt, str):
            if tokenizer is None:
                raise ValueError("Text prompts need a tokenizer: set strategy.tokenizer, or pass prompt_token_ids.")
            prompt = tokenizer.encode(prompt)
        ids = _without_runs(prompt, placeholder_ids) if media else prompt
        prompts.append(
            EnginePrompt(
                token_ids=tuple(int(token) for token in ids),
                images=tuple(media.get("image", ())),
                videos=tuple(media.get("video", ())),
            )
        )
    return prompts


def _without_runs(ids: Sequence[int], placeholder_ids: Collection[int]) -> list[int]:
    return [
        token for index, token in enumerate(ids) if not (token in placeholder_ids and index and ids[index - 1] == token)
    ]


def as_item(completion: Completion, tokenizer: Decoder | None) -> EasyDict:
    """Converts a completion to the item that gather_and_generate returns."""
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
    """Returns a dict per prompt: "prompt" (a text or token ids), and "multi_modal_data" if it has images or videos."""
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
    """Takes nested lists as they are and cuts flat ones by the counts; without counts each prompt has one item."""
    if items is None:
        return [[] for _ in prompts]
    is_nested = any(isinstance(item, list | tuple) for item in items)
    if counts is not None and len(counts) != len(prompts):
        raise ValueError(f"{len(counts)} {kind} counts for {len(prompts)} prompts.")
    if is_nested or (counts is None and len(items) == len(prompts)):
        nested = [list(item) if isinstance(item, list | tuple) else [] if item is None else [item] for item in items]
        if len(nested) != len(prompts):
            raise ValueError(f"{len(nested)} lists of {kind}s for {len(prompts)} prompts.")
        for index, own in enumerate(nested):
            if counts is not None and counts[index] != len(own):
                raise ValueError(f"prompt {index} has {len(own)} {kind}s, but its count says {counts[index]}.")
        return nested
    if counts is None:
        raise ValueError(f"{len(items)} {kind}s for {len(prompts)} prompts: say how many each has in {kind}s_num.")
    if sum(counts) != len(items):
        raise ValueError(f"{len(items)} {kind}s, but the counts {list(counts)} add up to {sum(counts)}.")
    ends = [sum(counts[: index + 1]) for index in range(len(counts))]
    return [list(items[end - count : end]) for end, count in zip(ends, counts, strict=True)]
