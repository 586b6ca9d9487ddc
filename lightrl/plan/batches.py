"""The number of sequences and tokens that each rank learns from at a time, and the work of a step."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from lightrl.config import (
    DPOConfig,
    GRPOConfig,
    OfflineConfig,
    PPOConfig,
    RMConfig,
    RolloutConfig,
    RunConfig,
)
from lightrl.plan.activations import PackShape
from lightrl.plan.models import Model
from lightrl.plan.rectangles import is_tied
from lightrl.trainers.token_selection import needs_selection


@dataclass(frozen=True, slots=True, kw_only=True)
class Batches:
    """A step in numbers, if every sequence is as long as it can be."""

    length: int  # tokens of a sequence with its prompt
    answers: int  # sequences that a micro-batch keeps together: 2 for a pair
    sequences: int  # per step, over all ranks
    updates: int  # optimizer steps per step
    of_rank: int  # sequences per rank and update
    micro_batches: int  # per rank and update
    pack: PackShape  # the largest micro-batch
    computed_share: float = 1.0  # share of the tokens that the trainer runs
    whole_roles: frozenset[str] = frozenset()  # models that share no prompts while others do

    def pack_of(self, role: str) -> PackShape:
        """Returns the largest micro-batch as the model in a role runs it."""
        return replace(self.pack, families=()) if role in self.whole_roles else self.pack

    def describe(self) -> str:
        """Returns the arithmetic in one line."""
        return (
            f"{self.sequences} sequences of {self.length} tokens a step, {self.updates} update(s); a rank learns from "
            f"{self.of_rank} sequences an update in {self.micro_batches} micro-batch(es) of at most "
            f"{self.pack.num_sequences} sequences, {self.pack.num_tokens} tokens"
        )


def batches_of(config: RunConfig, *, ranks: int, prompt_tokens: int, response_tokens: int) -> Batches:
    """Returns the batches of a run whose ranks all train."""
    scored = config.max_new_tokens if isinstance(config, RolloutConfig) and not response_tokens else response_tokens
    length = prompt_tokens + scored
    answers = 2 if isinstance(config, DPOConfig | RMConfig) else 1  # sequences per item; micro-batches keep items whole
    items = -(-config.samples_per_update // ranks)
    most = config.micro_batch_size or max(1, config.max_tokens_per_microbatch // (length * answers))
    count = -(-items // most)
    updates = config.optimizer_steps_per_step
    return Batches(
        length=length,
        answers=answers,
        sequences=answers
        * (config.samples_per_step if isinstance(config, RolloutConfig) else config.samples_per_update),
        updates=updates,
        of_rank=answers * items,
        micro_batches=count * config.tp_size * config.sp_size * config.megatron.pp_size * config.megatron.cp_size,
        pack=PackShape(
            num_sequences=answers * -(-items // count),
            length=length,
            num_scored=1 if isinstance(config, RMConfig) else scored,
        ),
    )


def flops_of_step(
    config: RunConfig,
    policy: Model,
    batches: Batches,
    passes: Passes,
    others: Iterable[Model] = (),
    critic: Model | None = None,
) -> float:
    """Returns the floating-point operations of a step over all ranks, without those of the weight sync.

    Args:
        config: The options of the run.
        policy: The trained model.
        batches: The sequences of a step.
        passes: How many times the policy, or a model of its size, runs over them.
        others: Models of their own size, which read every sequence once.
        critic: A model that is trained as often as the policy and scores every sequence once; None: there is none.
    """
    trained = passes.trained * (4 if config.gradient_checkpointing else 3)
    sampled = int(isinstance(config, RolloutConfig))
    by_policy = sampled + batches.computed_share * (trained + passes.scored - sampled)
    runs = [(policy, by_policy), *((model, _share_of(model, batches)) for model in others)]
    if critic is not None:
        runs.append((critic, (trained + 1) * _share_of(critic, batches)))
    return sum(times * _flops_of_pass(model, batches) for model, times in runs)


def _share_of(model: Model, batches: Batches) -> float:
    """Returns the share of the tokens that a model runs."""
    return 1.0 if model.role in batches.whole_roles else batches.computed_share


def _flops_of_pass(model: Model, batches: Batches) -> float:
    """Returns the operations of a forward pass of all whole sequences of a step."""
    text = model.hf_config.get_text_config()
    heads, width = text.num_attention_heads, _head_dim(text)
    tokens = batches.sequences * batches.length
    linear = 2.0 * active_weights(model.hf_config, model) * tokens
    attention = 2.0 * text.num_hidden_layers * heads * width * batches.length * tokens
    return float(linear + attention)


@dataclass(frozen=True, slots=True, kw_only=True)
class Passes:
    """How many times a step runs all of its tokens through the policy, or through a model of its size."""

    trained: int
    scored: int  # forward only, including the engine's


def passes_of(config: RunConfig) -> Passes:
    """Returns the passes of a step, without those of a critic that is a model of its own."""
    if isinstance(config, OfflineConfig):
        return Passes(trained=1, scored=int(isinstance(config, DPOConfig)))
    assert isinstance(config, GRPOConfig | PPOConfig)
    trained, scored = config.optimizer_steps_per_step // config.num_minibatches, 1
    has_values = isinstance(config, PPOConfig) and config.critic.shared_backbone  # the same pass gives both
    scored += has_values or _scores_first(config)
    scored += config.algorithm.kl_coef > 0
    return Passes(trained=trained, scored=scored)


def _scores_first(config: GRPOConfig | PPOConfig) -> bool:
    """Returns whether the policy scores all samples of a step, older ones among them, before the first update."""
    older = config.samples_can_be_older
    if isinstance(config, PPOConfig):
        return config.scores_first(has_older=older, is_frozen=False)
    return config.scores_first(has_older=older, selects=needs_selection(config.algorithm))


def active_weights(hf_config: Any, model: Model) -> float:
    """Returns the number of weights that a token passes through; of a mixture, only its chosen experts count."""
    text = hf_config.get_text_config()
    num_experts = getattr(text, "num_experts", None) or getattr(text, "num_local_experts", None) or 1
    share = (getattr(text, "num_experts_per_tok", None) or 1) / num_experts if num_experts > 1 else 1.0
    return sum(
        weight.numel * (share if ".experts." in weight.name else 1.0)
        for weight in model.weights
        if "embed_tokens" not in weight.name or is_tied(model)  # then it is the output head, too
    )


def kv_bytes_of_token(hf_config: Any, itemsize: int) -> int:
    """Returns the bytes of a token's keys and values in all layers."""
    text = hf_config.get_text_config()
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    return 2 * int(text.num_hidden_layers * heads * _head_dim(text) * itemsize)


def _head_dim(text: Any) -> int:
    return int(getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads)
