"""The trained (or the reference) language model: from a pack of sequences to scores of its response tokens."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lightrl.models.logprobs import chosen_logprobs
from lightrl.models.multimodal import (
    blank_vision,
    decoder_inputs,
    join_vision,
    pack_positions,
    patch_dim,
    rope_positions,
    takes_images,
)
from lightrl.models.packed_attention import packed_hidden_states, use_packed_attention
from lightrl.models.token_share import SequenceGroup, pick, token_share
from lightrl.records import EncodedPrompt, PackedBatch, TokenScores

_PREFIX = "hf."
_CHECK_LENGTHS = (7, 7, 12)  # tokens of the sequences check_scores() runs: two of equal length, one longer
_CHECK_GRID = (1, 4, 6)  # patches of the image in the last of them: 6 features of 2 x 2
_CHECK_TEMPERATURE = 0.7


class Policy(nn.Module):
    """A causal language model that scores packs. All its weights, the output embedding too, work inside forward."""

    is_actor = True

    def __init__(self, hf_model: PreTrainedModel, *, entropy: bool = True) -> None:
        """Takes over a model from transformers: its attention becomes the packed one and its dropout is turned off.

        Args:
            entropy: False leaves the entropy out, which then is NaN: for a frozen reference.
        """
        super().__init__()
        self.hf = hf_model
        self.entropy = entropy
        self.sequence_group: SequenceGroup | None = None  # ranks that split the tokens of every pack
        self._takes_images = takes_images(hf_model.config)
        use_packed_attention(hf_model.get_decoder())
        disable_dropout(hf_model)

    def forward(self, batch: PackedBatch) -> TokenScores:
        return self.scores(self.hidden_states(batch), batch)

    def hidden_states(self, batch: PackedBatch) -> Tensor:
        """[T, H] behind the last layer; of this rank's tokens where ranks split them."""
        share = token_share(batch, self.sequence_group)
        return packed_hidden_states(
            self.hf.get_decoder(),
            share.input_ids,
            share.position_ids,
            share.cu_seqlens,
            self._embeddings(batch),
            self.sequence_group,
        )

    def scores(self, hidden: Tensor, batch: PackedBatch) -> TokenScores:
        """Of the response tokens, from hidden_states()."""
        picked = pick(batch.score_index, hidden, self.sequence_group)
        head = self.hf.get_output_embeddings()
        logprobs, entropy = chosen_logprobs(
            hidden[picked.places],
            head.weight,
            batch.targets[picked.which],
            bias=getattr(head, "bias", None),
            temperature=batch.temperature,
            softcap=_softcap(self.hf),
            logit_scale=_logit_scale(self.hf),
            with_entropy=self.entropy,
        )
        return TokenScores(logprobs=picked.joined(logprobs), entropy=picked.joined(entropy))

    def _embeddings(self, batch: PackedBatch) -> dict[str, Any] | None:
        """Tokens and images together; None for a model of text alone."""
        if not self._takes_images:
            if batch.vision is not None:
                raise ValueError(f"The pack has images, and {self.hf.config.model_type} takes none.")
            return None
        # Every rank runs the vision tower, with or without an image: where it is sharded, a rank that left it out
        # would leave the others waiting.
        vision = batch.vision or blank_vision(self.hf.config, batch.input_ids.device)
        return decoder_inputs(self.hf, batch.input_ids[None], vision)


def hf_named_parameters(policy: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Every parameter once under its transformers name, sorted by name, so that all ranks go in one order."""
    named = policy.named_parameters()  # names a tied parameter once
    return sorted((name.removeprefix(_PREFIX), parameter) for name, parameter in named)


def disable_dropout(model: nn.Module) -> None:
    """Turns dropout off for good: the loss compares the probabilities of two passes over one token.

    Layers hold their rate in an nn.Dropout or, for the functional form, as a number named *dropout.
    """
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name, value in vars(module).items():
            if name.endswith("dropout") and isinstance(value, float):
                setattr(module, name, 0.0)


def check_scores(policy: Policy, device: torch.device) -> None:
    """Raises ValueError unless the policy agrees with the model's own logits, to 1e-3 (3e-2 in half precision).

    For models that change their logits, or mix tokens, in a way that Policy does not know. Run it before the policy is
    sharded.
    """
    prompts = _random_prompts(policy.hf)
    targets = torch.cat([_random_tokens(policy.hf, len(prompt.token_ids), seed=-1) for prompt in prompts]).to(device)
    is_training = policy.training
    policy.eval()
    with torch.no_grad():
        ours = policy(_scored_everywhere(policy.hf, prompts, targets).to(device)).logprobs
        theirs = _logprobs_of_hf(policy.hf, prompts, targets)
    policy.train(is_training)
    difference = ((ours - theirs).abs().max() / theirs.abs().max()).item()
    allowed = 1e-3 if policy.hf.dtype in (torch.float32, torch.float64) else 3e-2
    if not difference <= allowed:  # a NaN fails too
        raise ValueError(
            f"The scores of model type {policy.hf.config.model_type!r} differ from its own logits by {difference:.2g} "
            f"relative ({allowed:g} is allowed): it changes its logits or mixes tokens in a way that lightrl does not "
            "know. Choose another model, or teach lightrl.models.policy its output."
        )


def _text_value(model: PreTrainedModel, name: str) -> float | None:
    value: float | None = getattr(model.config.get_text_config(), name, None)
    return value


def _softcap(model: PreTrainedModel) -> float | None:
    return _text_value(model, "final_logit_softcapping")


def _logit_scale(model: PreTrainedModel) -> float:
    """Cohere multiplies by logit_scale; Granite divides by logits_scaling, and HyperCLOVA X multiplies by it."""
    scale = _text_value(model, "logit_scale") or 1.0
    divisor = _text_value(model, "logits_scaling") or 1.0
    return scale * divisor if "hyperclovax" in model.config.model_type else scale / divisor


def response_batch(
    pairs: Sequence[tuple[Sequence[int], Sequence[int]]],
    temperature: float = 1.0,
    encoded: Sequence[EncodedPrompt] | None = None,
) -> PackedBatch:
    """A pack that scores the responses of (prompt, response) pairs of token ids and trains nothing.

    encoded: the prompts as a vision-language model takes them.
    """
    lengths = [len(prompt) + len(response) for prompt, response in pairs]
    starts = [0, *accumulate(lengths)]
    targets = torch.tensor([token for _, response in pairs for token in response], dtype=torch.int64)
    places = [
        torch.arange(start + len(prompt) - 1, start + len(prompt) + len(response) - 1)
        for start, (prompt, response) in zip(starts, pairs, strict=False)
    ]
    zeros = torch.zeros(len(targets))
    return PackedBatch(
        input_ids=torch.tensor([token for pair in pairs for part in pair for token in part], dtype=torch.int64),
        position_ids=pack_positions(lengths, encoded),
        cu_seqlens=tuple(starts),
        score_index=torch.cat(places),
        targets=targets,
        sequence_index=torch.arange(len(pairs)).repeat_interleave(
            torch.tensor([len(response) for _, response in pairs])
        ),
        loss_mask=zeros.bool(),
        advantages=zeros,
        sampler_logprobs=zeros,
        temperature=temperature,
        keys=tuple((0, place) for place in range(len(pairs))),
        vision=join_vision(encoded, starts[:-1]) if encoded is not None else None,
    )


def _random_tokens(model: PreTrainedModel, count: int, seed: int) -> Tensor:
    """Placeholders of images and videos are left out."""
    special = {getattr(model.config, name, None) for name in ("image_token_id", "video_token_id")}
    draw = torch.randint(
        model.config.get_text_config().vocab_size,
        (2 * count + len(special),),
        generator=torch.Generator().manual_seed(seed),
    )
    return torch.tensor([token for token in draw.tolist() if token not in special][:count])


def _random_prompts(model: PreTrainedModel) -> list[EncodedPrompt]:
    """Sequences to compare; the last has an image in its middle, if the model takes any."""
    prompts = [_random_prompt(model, length, seed) for seed, length in enumerate(_CHECK_LENGTHS)]
    if takes_images(model.config):
        prompts[-1] = _with_random_image(model, prompts[-1])
    return prompts


def _random_prompt(model: PreTrainedModel, length: int, seed: int) -> EncodedPrompt:
    return EncodedPrompt(
        token_ids=tuple(_random_tokens(model, length, seed).tolist()),
        positions=torch.arange(length).expand(3, -1),
        rope_delta=0,
        places=torch.zeros(0, dtype=torch.int64),
    )


def _with_random_image(model: PreTrainedModel, prompt: EncodedPrompt) -> EncodedPrompt:
    config: Any = model.config
    grid = torch.tensor(_CHECK_GRID)
    num_patches = int(grid.prod())
    num_features = num_patches // config.vision_config.spatial_merge_size**2
    middle = len(prompt.token_ids) // 2
    ids = (*prompt.token_ids[:middle], *[config.image_token_id] * num_features, *prompt.token_ids[middle:])
    positions, rope_delta = rope_positions(config, ids, grid[None])
    return EncodedPrompt(
        token_ids=ids,
        positions=positions,
        rope_delta=rope_delta,
        places=torch.arange(middle, middle + num_features),
        pixel_values=torch.randn(num_patches, patch_dim(config), generator=torch.Generator().manual_seed(0)),
        grid_thw=grid[None],
    )


def _scored_everywhere(model: PreTrainedModel, prompts: list[EncodedPrompt], targets: Tensor) -> PackedBatch:
    """A pack that scores a target of its own at every place."""
    lengths = [len(prompt.token_ids) for prompt in prompts]
    encoded = prompts if takes_images(model.config) else None
    starts = [0, *accumulate(lengths)]
    zeros = torch.zeros(starts[-1])
    return PackedBatch(
        input_ids=torch.tensor([token for prompt in prompts for token in prompt.token_ids]),
        position_ids=pack_positions(lengths, encoded),
        cu_seqlens=tuple(starts),
        score_index=torch.arange(starts[-1]),
        targets=targets,
        sequence_index=torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths)),
        loss_mask=zeros.bool(),
        advantages=zeros,
        sampler_logprobs=zeros,
        temperature=_CHECK_TEMPERATURE,
        keys=tuple((0, place) for place in range(len(lengths))),
        vision=join_vision(encoded, starts[:-1]) if encoded else None,
    )


def _logprobs_of_hf(model: PreTrainedModel, prompts: list[EncodedPrompt], targets: Tensor) -> Tensor:
    """The same scores by the model's own forward and eager attention, one sequence at a time."""
    decoder = model.get_decoder()
    packed = decoder.config._attn_implementation
    decoder.set_attn_implementation("eager")
    try:
        logits = [_logits_of_hf(model, prompt, targets.device) for prompt in prompts]
    finally:
        decoder.set_attn_implementation(packed)
    return (torch.cat(logits) / _CHECK_TEMPERATURE).log_softmax(-1).gather(1, targets[:, None])[:, 0]


def _logits_of_hf(model: PreTrainedModel, prompt: EncodedPrompt, device: torch.device) -> Tensor:
    ids = torch.tensor([prompt.token_ids], device=device)
    image: dict[str, Tensor] = {}
    if prompt.pixel_values is not None and prompt.grid_thw is not None:
        image["pixel_values"] = prompt.pixel_values.to(device)
        image["image_grid_thw"] = prompt.grid_thw.to(device)
        image["position_ids"] = prompt.positions[:, None].to(device)
    logits: Tensor = model(input_ids=ids, use_cache=False, **image).logits
    return logits[0].float()
