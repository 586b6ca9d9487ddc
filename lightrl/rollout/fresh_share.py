"""Keeps a share of each step's groups on policy (--rollout.on_policy_min_ratio): a step waits for fresh groups."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from lightrl.config import RolloutConfig
from lightrl.rollout.scheduler import Rules


def oldest_with_fresh(
    started: Mapping[int, int], finished: Collection[int], *, step: int, rules: Rules
) -> tuple[int, ...] | None:
    """Returns the finished groups that a step takes, oldest first; None while there are too few, or too few fresh ones.

    Groups are fresh if they were started under the weights of the step. The batch consists of the groups that started
    first, but the youngest of these are replaced by fresh ones until the share is reached.

    Args:
        started: The version that each group was started under.
        rules: The size of a batch, and the share.
    """
    ordered = sorted(finished, key=lambda group: (started[group], group))
    fresh = [group for group in ordered if started[group] == step]
    needed = num_fresh(rules)
    if len(ordered) < rules.batch_size or len(fresh) < needed:
        return None
    others = [group for group in ordered if group not in fresh[:needed]]
    chosen = {*fresh[:needed], *others[: rules.batch_size - needed]}
    return tuple(group for group in ordered if group in chosen)


def num_fresh(rules: Rules) -> int:
    """Returns how many groups of a batch must be fresh: the fewest whose share is not below the ratio."""
    size = rules.batch_size
    return next(count for count in range(size + 1) if count / size >= rules.on_policy_min_ratio)


def num_steps_started(rules: Rules, version: int, max_steps: int) -> int:
    """Returns the number of steps for which groups may be started under a version of the weights.

    The last steps need fresh groups, too, even if all their other groups may have been started long before.
    """
    ahead = rules.max_staleness + version + 1
    return ahead if rules.on_policy_min_ratio else min(ahead, max_steps)


def bounded_rules(config: RolloutConfig) -> Rules:
    """Returns the rules of a run in which some ranks only generate."""
    return Rules(
        batch_size=config.num_prompts,
        max_staleness=config.rollout.max_staleness,
        on_policy_min_ratio=config.rollout.on_policy_min_ratio,
    )
