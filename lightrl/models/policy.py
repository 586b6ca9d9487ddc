"""The trained (or the reference) language model: from a pack of sequences to scores of its response tokens."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lightrl.models.logprobs import chosen_logprobs
from lightrl.models.packed_attention import packed_hidden_states, use_packed_attention
from lightrl.records import PackedBatch, TokenScores

_PREFIX = "hf."
_CHECK_LENGTHS = (7, 7, 12)  # tokens of the sequences check_scores() runs: two of equal length, one longer
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
        use_packed_attention(hf_model.get_decoder())
        disable_dropout(hf_model)

    def forward(self, batch: PackedBatch) -> TokenScores:
        hidden = packed_hidden_states(self.hf.get_decoder(), batch.input_ids, batch.position_ids, batch.cu_seqlens)
        head = self.hf.get_output_embeddings()
        logprobs, entropy = chosen_logprobs(
            hidden[batch.score_index],
            head.weight,
            batch.targets,
            bias=getattr(head, "bias", None),
            temperature=batch.temperature,
            softcap=_softcap(self.hf),
            logit_scale=_logit_scale(self.hf),
            with_entropy=self.entropy,
        )
        return TokenScores(logprobs=logprobs, entropy=entropy)


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
    sequences, targets = _random_tokens(policy.hf, device), _random_tokens(policy.hf, device, seed=1)
    is_training = policy.training
    policy.eval()
    with torch.no_grad():
        ours = policy(_scored_everywhere(sequences, targets)).logprobs
        theirs = _logprobs_of_hf(policy.hf, sequences, targets)
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


def response_batch(pairs: Sequence[tuple[Sequence[int], Sequence[int]]], temperature: float = 1.0) -> PackedBatch:
    """A pack that scores the responses of (prompt, response) pairs of token ids and trains nothing."""
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
        position_ids=torch.cat([torch.arange(length) for length in lengths]),
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
    )


def _random_tokens(model: PreTrainedModel, device: torch.device, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    vocab_size = model.config.get_text_config().vocab_size
    return [torch.randint(vocab_size, (length,), generator=generator).to(device) for length in _CHECK_LENGTHS]


def _scored_everywhere(sequences: list[Tensor], targets: list[Tensor]) -> PackedBatch:
    """A pack that scores a target of its own at every place."""
    lengths = [len(ids) for ids in sequences]
    input_ids = torch.cat(sequences)
    zeros = torch.zeros(input_ids.shape[0])
    batch = PackedBatch(
        input_ids=input_ids,
        position_ids=torch.cat([torch.arange(length) for length in lengths]),
        cu_seqlens=(0, *accumulate(lengths)),
        score_index=torch.arange(input_ids.shape[0]),
        targets=torch.cat(targets),
        sequence_index=torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths)),
        loss_mask=zeros.bool(),
        advantages=zeros,
        sampler_logprobs=zeros,
        temperature=_CHECK_TEMPERATURE,
        keys=tuple((0, place) for place in range(len(lengths))),
    )
    return batch.to(input_ids.device)


def _logprobs_of_hf(model: PreTrainedModel, sequences: list[Tensor], targets: list[Tensor]) -> Tensor:
    """The same scores by the model's own forward and eager attention, one sequence at a time."""
    decoder = model.get_decoder()
    packed = decoder.config._attn_implementation
    decoder.set_attn_implementation("eager")
    try:
        scores = []
        for ids, chosen in zip(sequences, targets, strict=True):
            logits = model(input_ids=ids[None], use_cache=False).logits[0].float()
            scores.append((logits / _CHECK_TEMPERATURE).log_softmax(-1).gather(1, chosen[:, None])[:, 0])
    finally:
        decoder.set_attn_implementation(packed)
    return torch.cat(scores)
