"""The options that `--exact` refuses: each names the reason why its bits would depend on how the run is spread."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from lightrl.config.options import refuse_beside

_STRATEGIES = ("auto", "single", "ddp", "fsdp")
_REWARDS = {
    "judge": "the replies of its server are not this run's",
    "reward_model": "it scores batches whose size depends on the ranks",
}
_REASONS: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    ("strategy", lambda value: value not in _STRATEGIES, "only single, ddp and fsdp can add gradients in any order"),
    ("engine", lambda value: value != "native", "the batch of its kernels decides the bits of a token's probability"),
    ("dtype", lambda value: value != "float32", "products in bfloat16 depend on the rows beside"),
    ("distributed.device", lambda value: value == "cuda", "kernels of a GPU depend on the rows beside"),
    ("tp_size", lambda value: value > 1, "each size adds other partial sums within a product"),
    ("sp_size", lambda value: value > 1, "each size adds other partial sums over the tokens"),
    ("engine_tp_size", lambda value: value > 1, "no group of ranks shares an exact engine"),
    ("compile", bool, "compiled kernels differ from those of the engine"),
    ("optim.name", lambda value: value != "adamw", "only the update of AdamW is the same for a shard"),
    ("fsdp.replicate_size", lambda value: value > 1, "replicas are reduced apart, after the shards"),
    ("fsdp.reduce_dtype", lambda value: value != "float32", "gradients are rounded before they are added"),
    ("fsdp.cpu_offload", bool, "gradients leave the reduction before they are added"),
    ("routing.balance_coef", bool, "the statistics of routers are those of a micro-batch"),
    ("routing.z_coef", bool, "the statistics of routers are those of a micro-batch"),
    ("rollout_ranks", bool, "ranks that only generate run ahead of those that train"),
    ("rollout.workflow", bool, "the turns of an episode follow the clock"),
    ("rollout.is_scheduled", bool, "the clock decides which samples a step learns from"),
    ("data.curriculum", bool, "no exact run has chosen its prompts by their results yet"),
    ("rollout.is_recorded", bool, "a record keeps the samples of each rank apart"),
    ("algorithm.entropy_fraction", lambda value: value < 1, "the limit is found from sums of each rank"),
    ("algorithm.loss", lambda value: value in ("clip_cov", "kl_cov"), "it selects tokens by sums of each rank"),
    (
        "algorithm.advantage",
        lambda value: value == "gdpo" or value.startswith("reinforce_plus"),
        "it whitens by the moments of each rank",
    ),
    ("algorithm.aggregation", lambda value: ":" in value, "the denominator of your own function is no count"),
)
_FLAGS = {
    "rollout.is_scheduled": "rollout.over_issue, --rollout.max_staleness or --rollout.filter",
    "rollout.is_recorded": "rollout.record or --rollout.from",
}


def check_exact(config: Any) -> None:
    """Raises ValueError for an option whose result would depend on the ranks or the micro-batches."""
    if not config.exact:
        raise ValueError("--exact_tile_tokens has no effect without --exact True: add that, or leave it out.")
    refuse_beside("exact True", _reasons_against(config))


def _reasons_against(config: Any) -> Iterator[tuple[str, bool, str]]:
    for name, is_refused, reason in _REASONS:
        value = _value(config, name)
        yield _FLAGS.get(name, f"{name} {value}"), value is not None and is_refused(value), reason
    for reward in getattr(config, "reward", ()):
        name = reward.partition("=")[0]
        yield f"reward {reward}", name in _REWARDS, _REWARDS.get(name, "")


def _value(config: Any, name: str) -> Any:
    """Returns an option by its full name; None where this kind of run has no such option."""
    for part in name.split("."):
        config = getattr(config, part, None)
    return config
