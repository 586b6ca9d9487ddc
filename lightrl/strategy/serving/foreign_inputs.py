"""Inputs and results of gather_and_generate and engine_generate_local in the forms of other trainers.

Inputs are texts or token ids, and results are read by attribute. lightrl's own trainers call generate() with
EnginePrompt and SamplingParams, and never run this code.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from easydict import EasyDict

from lightrl.engines.base import Completion, EnginePrompt, SamplingParams
from lightrl.engines.colocated import ColocatedEngine
from lightrl.strategy.serving.colocated_serving import ColocatedServing
from lightrl.strategy.serving.foreign_media import as_images, as_videos, build_multimodal_inputs
from lightrl.strategy.serving.foreign_params import gathered_seeds, local_seeds, params_for_each, read_setting


class Decoder(Protocol):
    """The part of a tokenizer that turns token ids to text and back."""

    def decode(self, token_ids: Any, skip_special_tokens: bool = ...) -> Any: ...

    def encode(self, text: str) -> Any: ...


class Caller(Protocol):
    """The parts of a strategy that generation needs."""

    seed: int
    tokenizer: Decoder | None
    num_generations: int

    @property
    def serving(self) -> ColocatedServing: ...


FindTokenizer = Callable[[], Decoder]  # called if text is given and the strategy has no tokenizer


def generate_local(
    caller: Caller,
    sampling_params: Any,
    prompt_token_ids: Any | None,
    multi_modal_inputs: list[dict[str, Any]] | None,
    find_tokenizer: FindTokenizer,
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
    prompts = _prompts_of(caller, inputs, find_tokenizer)
    seeds = local_seeds(caller.seed, caller.num_generations, group.comm.rank // group.size)
    params = params_for_each(sampling_params, len(prompts), 0, seeds)
    _give_tokenizer(caller, params, find_tokenizer)
    caller.num_generations += 1
    return _items(caller, engine.generate(prompts, params), params, sampling_params)


def generate_gathered(
    caller: Caller,
    sampling_params: Any,
    *,
    token_ids: Any | None,
    texts: list[str] | None,
    media: tuple[Any, Any, Any, Any],
    sleep_engine: bool,
    for_training: bool,
    find_tokenizer: FindTokenizer,
) -> list[EasyDict]:
    """Samples this rank's prompts on the engine that its group shares; a collective.

    Args:
        media: images, images_num, videos and videos_num, as build_multimodal_inputs takes them.
    """
    caller.serving.require_engine()
    comm = caller.serving.group.comm
    with comm.phase("generate", local=True):
        prompts = _prompts_of(caller, _inputs(token_ids, texts, media), find_tokenizer)
    counts, calls = zip(*comm.all_gather_object((len(prompts), caller.num_generations)), strict=True)
    call = max(calls)  # a rank may have sampled more often on its own
    caller.num_generations = call + 1
    with comm.phase("generate", local=True):
        first = sum(counts[: comm.rank])
        params = params_for_each(sampling_params, len(prompts), first, gathered_seeds(caller.seed, call, first))
        if for_training:
            for item in params:
                item.require_trainable()
        _give_tokenizer(caller, params, find_tokenizer)
    completions = caller.serving.generate(prompts, params, sleep_engine=sleep_engine)
    return _items(caller, completions, params, sampling_params)


def _inputs(token_ids: Any | None, texts: list[str] | None, media: tuple[Any, Any, Any, Any]) -> list[dict[str, Any]]:
    """Returns a dict per prompt. If a text and token ids are given, the text counts with images or videos."""
    if token_ids is None and texts is None:
        raise ValueError("Give all_prompt_token_ids, all_prompts, or both for the same prompts; neither was given.")
    ids = None if token_ids is None else as_prompt_list(token_ids)
    if texts is None:
        return build_multimodal_inputs(ids or [], *media)
    inputs = build_multimodal_inputs(texts, *media)
    if ids is None:
        return inputs
    if len(ids) != len(texts):
        raise ValueError(
            f"{len(ids)} prompts in all_prompt_token_ids and {len(texts)} in all_prompts: give the same in both."
        )
    return [item if "multi_modal_data" in item else {"prompt": own} for item, own in zip(inputs, ids, strict=True)]


def _prompts_of(
    caller: Caller, inputs: Sequence[Mapping[str, Any]], find_tokenizer: FindTokenizer
) -> list[EnginePrompt]:
    if caller.tokenizer is None and any(isinstance(item["prompt"], str) for item in inputs):
        caller.tokenizer = find_tokenizer()
    return engine_prompts(inputs, caller.tokenizer, _placeholder_ids(caller.serving.require_engine()))


def _give_tokenizer(caller: Caller, params: Sequence[SamplingParams], find_tokenizer: FindTokenizer) -> None:
    """Gives the engine a tokenizer to find stop strings with, if it has none."""
    engine = caller.serving.require_engine()
    if engine.tokenizer is None and any(item.stop for item in params):
        caller.tokenizer = engine.tokenizer = caller.tokenizer or find_tokenizer()


def _items(
    caller: Caller, completions: Sequence[Completion], params: Sequence[SamplingParams], given: Any
) -> list[EasyDict]:
    """Returns an item per completion. The text ends before a stop string, unless the parameters include it."""
    owners = [item for item in params for _ in range(item.n)]
    keeps_stop = read_setting(given, "include_stop_str_in_output")
    items = []
    for completion, own in zip(completions, owners, strict=True):
        item = as_item(completion, caller.tokenizer)
        item.is_trainable = own.is_trainable
        if own.stop and item.text is not None and not keeps_stop:
            item.text = min((item.text.partition(stop)[0] for stop in own.stop), key=len)
        items.append(item)
    return items


def _placeholder_ids(engine: ColocatedEngine) -> set[int]:
    """Returns the token ids that stand for an image or a video in a prompt."""
    ids = (engine.engine.image_token_id, engine.engine.video_token_id)
    return {token for token in ids if token is not None}


def as_prompt_list(prompt_token_ids: Sequence[Any]) -> list[list[int]]:
    """Returns a list of prompts from one prompt (a list of token ids) or from several."""
    if len(prompt_token_ids) and isinstance(prompt_token_ids[0], int | np.integer):
        return [list(prompt_token_ids)]
    return [prompt.tolist() if hasattr(prompt, "tolist") else list(prompt) for prompt in prompt_token_ids]


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
                images=as_images(media.get("image")),
                videos=as_videos(media.get("video")),
            )
        )
    return prompts


def _without_runs(ids: Sequence[int], placeholder_ids: Collection[int]) -> list[int]:
    return [
        token for index, token in enumerate(ids) if not (token in placeholder_ids and index and ids[index - 1] == token)
    ]


def as_item(completion: Completion, tokenizer: Decoder | None) -> EasyDict:
    """Converts a completion to an item of gather_and_generate."""
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
