"""Checks a model's scores on a few tokens: they must agree with its own logits, and not change in training mode.

The check refuses models that change their logits, mix tokens or draw random numbers in a way unknown to Policy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lightrl.models.fixed_rope import original_lengths
from lightrl.models.multimodal import patch_dim, rope_positions, sequence_positions
from lightrl.models.policy import Policy, response_batch
from lightrl.records import EncodedPrompt, PackedBatch

_LENGTHS = ((4, 3), (4, 3), (7, 5))  # tokens of the prompts and responses
_GRID = (1, 4, 6)  # patches of the image in the last prompt: 6 features of 2 x 2
_TEMPERATURE = 0.7
_WINDOWS = ("sliding_window", "attention_chunk_size")
_SHORT_WINDOW = 9  # between the shorter sequences of the checks (7 tokens) and the longest (12 tokens)
_BEFORE = 6  # tokens of the longest sequence that lie before a length at which a rope changes


def check_scores(policy: Policy, device: torch.device) -> None:
    """Raises ValueError unless the policy agrees with the model's own logits to 1e-3 (3e-2 in half precision).

    Call it before the policy is sharded.
    """
    model, was_training = policy.hf, policy.training
    _check_head(model)
    prompts = [random_tokens(model, length, seed) for seed, (length, _) in enumerate(_LENGTHS)]
    responses = [random_tokens(model, length, -1 - seed) for seed, (_, length) in enumerate(_LENGTHS)]
    encoded = _with_random_image(model.config, prompts) if policy.takes_images else None
    if encoded is not None:
        prompts = [prompt.token_ids for prompt in encoded]
    batch = response_batch(list(zip(prompts, responses, strict=True)), _TEMPERATURE, encoded).to(device)
    policy.eval()
    with torch.no_grad(), thresholds_in_reach(model, batch) as batch, _refusing_failures(model.config.model_type):
        ours, logits = policy(batch).logprobs, _own_logits(model, batch, encoded)[batch.score_index]
        in_training = (policy.train()(batch).logprobs - ours).abs().max() / ours.abs().max()
    policy.train(was_training)
    theirs = (logits / _TEMPERATURE).log_softmax(-1).gather(1, batch.targets[:, None])[:, 0]
    difference = ((ours - theirs).abs().max() / theirs.abs().max()).item()
    allowed = 1e-3 if model.dtype in (torch.float32, torch.float64) else 3e-2
    if not difference <= allowed:  # a NaN fails too
        raise _unknown_output(model.config.model_type, difference, allowed)
    if in_training > allowed / 10:
        raise refuse_randomness(policy, lambda: policy(batch), in_training.item())


def _check_head(model: PreTrainedModel) -> None:
    """Raises ValueError for weights of the output layer that the policy's logits leave out.

    Where they begin as 1, no score shows it, and they would silently stay as they are.
    """
    head: Any = model.get_output_embeddings()
    others = [name for name, _ in head.named_parameters() if name not in ("weight", "bias")] if head else []
    if isinstance(head, nn.Linear) and others:
        raise ValueError(
            f"Model type {model.config.model_type!r} cannot be trained: its output layer also has {', '.join(others)}, "
            "which lightrl would leave out. Choose another model."
        )


@contextmanager
def _refusing_failures(model_type: str) -> Iterator[None]:
    """Turns an error of a model's own code into one sentence for the user."""
    try:
        yield
    except (ValueError, NotImplementedError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        reason = " ".join(str(error).split())[:300]
        raise ValueError(
            f"Model type {model_type!r} cannot be trained: it fails on a few sequences of tokens "
            f"({type(error).__name__}: {reason}). Choose another model."
        ) from error


def _unknown_output(model_type: str, difference: float, allowed: float) -> ValueError:
    return ValueError(
        f"The scores of model type {model_type!r} differ from its own logits by {difference:.2g} relative ({allowed:g} "
        "is allowed): it changes its logits or mixes tokens in a way that lightrl does not know. Choose another model, "
        "or teach lightrl.models.policy its output."
    )


def random_tokens(model: PreTrainedModel, count: int, seed: int) -> tuple[int, ...]:
    """Draws token ids, never the placeholder of an image or video."""
    placeholders = {getattr(model.config, name, None) for name in ("image_token_id", "video_token_id")}
    generator = torch.Generator().manual_seed(seed)
    draw = torch.randint(model.config.get_text_config().vocab_size, (2 * count + 2,), generator=generator)
    return tuple([token for token in draw.tolist() if token not in placeholders][:count])


def _own_logits(model: PreTrainedModel, batch: PackedBatch, encoded: Sequence[EncodedPrompt] | None) -> Tensor:
    """Returns logits, [T, V] float32, of the model's own forward with eager attention, one sequence at a time."""
    decoder, rows = model.get_decoder(), []
    packed = decoder.config._attn_implementation
    decoder.set_attn_implementation("eager")
    try:
        for index, (start, end) in enumerate(pairwise(batch.cu_seqlens)):
            ids, first = batch.input_ids[start:end], int(batch.position_ids[..., start].max())
            if encoded is None:  # one more token, which the others do not see in a causal model
                ids = torch.cat([ids, ids[:1]])
                more = {"position_ids": torch.arange(first, first + len(ids), device=ids.device)[None]} if first else {}
            else:
                more = _image_inputs(encoded[index], end - start, ids.device)
            rows.append(model(input_ids=ids[None], use_cache=False, **more).logits[0, : end - start])
    finally:
        decoder.set_attn_implementation(packed)
    return torch.cat(rows).float()


def _image_inputs(prompt: EncodedPrompt, num_tokens: int, device: torch.device) -> dict[str, Tensor]:
    if prompt.pixel_values is None or prompt.grid_thw is None:
        return {}
    return {
        "pixel_values": prompt.pixel_values.to(device),
        "image_grid_thw": prompt.grid_thw.to(device),
        "position_ids": sequence_positions(prompt, num_tokens)[:, None].to(device),
    }


def _with_random_image(config: Any, prompts: Sequence[Sequence[int]]) -> list[EncodedPrompt]:
    """Encodes text prompts, the last one with an image in its middle."""
    texts = [
        EncodedPrompt(
            token_ids=tuple(ids),
            positions=torch.arange(len(ids)).expand(3, -1),
            rope_delta=0,
            feature_positions=torch.zeros(0, dtype=torch.int64),
        )
        for ids in prompts[:-1]
    ]
    return [*texts, random_image_in(config, prompts[-1], seed=0)]


def random_image_in(
    config: Any, text: Sequence[int], seed: int, patches: tuple[int, int, int] = _GRID
) -> EncodedPrompt:
    """Encodes a prompt with an image of random pixels in the middle of its text."""
    grid = torch.tensor([patches])
    num_patches = int(grid.prod())
    num_features = num_patches // config.vision_config.spatial_merge_size**2
    middle = len(text) // 2
    ids = (*text[:middle], *[config.image_token_id] * num_features, *text[middle:])
    positions, rope_delta = rope_positions(config, ids, grid)
    return EncodedPrompt(
        token_ids=ids,
        positions=positions,
        rope_delta=rope_delta,
        feature_positions=torch.arange(middle, middle + num_features),
        pixel_values=torch.randn(num_patches, patch_dim(config), generator=torch.Generator().manual_seed(seed)),
        grid_thw=grid,
    )


# ---- Thresholds --------------------------------------------------------------------------------------------------
#
# A sliding window of 4,096 tokens, or rope factors that change at 4,096, would not show in sequences of 7 and 12
# tokens, and longer ones would be slow on a large model.


@contextmanager
def thresholds_in_reach(model: PreTrainedModel, batch: PackedBatch) -> Iterator[PackedBatch]:
    """Yields the pack to check with, whose sequences lie on both sides of every threshold of the model.

    Within the context manager, sliding windows are shorter than the pack's longest sequence, which comes last. If the
    config names a length at which the rope changes, that sequence has positions around it.
    """
    decoder = model.get_decoder()  # not the vision tower, whose windows apply to images
    owners = (decoder.config, *decoder.modules())
    changed = [(owner, name) for owner in owners for name in _WINDOWS if _is_long(owner, name)]
    before = [getattr(owner, name) for owner, name in changed]
    lengths = original_lengths(model.config) if batch.vision is None else []
    try:
        for owner, name in changed:
            setattr(owner, name, _SHORT_WINDOW)
        yield _moved_to(batch, min(lengths)) if lengths else batch
    finally:
        for (owner, name), value in zip(changed, before, strict=True):
            setattr(owner, name, value)


def _is_long(owner: Any, name: str) -> bool:
    value = vars(owner).get(name)
    return isinstance(value, int) and not isinstance(value, bool) and value > _SHORT_WINDOW


def _moved_to(batch: PackedBatch, length: int) -> PackedBatch:
    """Returns the pack with the positions of its last sequence moved to around a length."""
    positions = batch.position_ids.clone()
    positions[batch.cu_seqlens[-2] :] += max(0, length - _BEFORE)
    return replace(batch, position_ids=positions)


# ---- Randomness --------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Call:
    """The tensors of one call of a module."""

    name: str
    inputs: list[Tensor]
    outputs: list[Tensor]


def refuse_randomness(model: nn.Module, run: Callable[[], object], difference: float) -> ValueError:
    """Returns the error for a model whose scores differ in training mode, which names the responsible module.

    Args:
        model: the model that run() calls.
        run: runs the model on the same tokens each time.
        difference: the difference, relative to the largest score.
    """
    model.eval()
    expected = _calls(model, run)
    model.train()
    found = _calls(model, run)
    names = [
        theirs.name
        for ours, theirs in zip(expected, found, strict=False)
        if _same(ours.inputs, theirs.inputs) and not _same(ours.outputs, theirs.outputs)
    ]
    where = f"{names[0]} ({type(model.get_submodule(names[0])).__name__})" if names else "a module that was not found"
    return ValueError(
        f"In training mode the scores of the model differ by {difference:.2g} relative from those in evaluation mode, "
        f"because of {where}: it draws random numbers, or computes something else. Two passes over one token must "
        "agree. Set the rate of its dropout or noise to 0 in the model's config.json, or choose another model."
    )


def _calls(model: nn.Module, run: Callable[[], object]) -> list[_Call]:
    """Returns the calls of all modules in the order in which they ended, so that an inner module comes first."""
    under_way: list[list[Tensor]] = []
    done: list[_Call] = []

    def begin(module: nn.Module, args: Any, kwargs: Any) -> None:
        under_way.append([part.clone() for part in _tensors((args, kwargs))])  # a module may change its input in place

    def end(name: str, module: nn.Module, args: Any, output: Any) -> None:
        done.append(_Call(name, under_way.pop(), [part.clone() for part in _tensors(output)]))

    handles = []
    for name, module in model.named_modules():
        handles.append(module.register_forward_pre_hook(begin, with_kwargs=True))
        handles.append(module.register_forward_hook(partial(end, name)))
    try:
        with torch.no_grad():
            run()
    finally:
        for handle in handles:
            handle.remove()
    return done


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [part for item in value for part in _tensors(item)] if isinstance(value, list | tuple) else []


def _same(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    return len(ours) == len(theirs) and all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
