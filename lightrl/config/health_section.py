"""The options that say when the metrics of a step are bad, and after how many such steps a run stops."""

from __future__ import annotations

from dataclasses import dataclass

from lightrl.config.options import option


@dataclass(kw_only=True, slots=True)
class HealthConfig:
    """When a run stops because of bad steps."""

    max_bad_steps: int = option(0, at_least=0)
    """Stop after this many bad steps in a row. A step is bad if an update was skipped, a metric is not finite, or a
    limit of --health.* is passed. GRPO and PPO keep the last batch for `lightrl replay`. 0: only warn, but stop after
    10 steps in a row in which a workflow rejected every sample."""


@dataclass(kw_only=True, slots=True)
class RolloutHealthConfig(HealthConfig):
    """When a step counts as bad, and when a run stops because of bad steps."""

    min_entropy: float = option(0.001, at_least=0)
    """A step is bad if the mean entropy of the policy at its response tokens is below this, in nats."""
    max_mismatch: float = option(0.1, at_least=0)
    """A step is bad if the logprobs of engine and trainer differ by more than this on average."""
    max_truncated: float = option(0.99, at_least=0, at_most=1)
    """A step is bad if more than this share of its responses was cut off at max_new_tokens."""
    max_failed_episodes: float = option(0.1, at_least=0, at_most=1)
    """A step is bad if more than this share of its episodes (--rollout.workflow) failed; reward/mean leaves them
    out."""
    min_response_tokens: float = option(1.0, at_least=0)
    """A step is bad if its responses have this many tokens or fewer on average; an empty response is a lone end token.
    0: never."""


@dataclass(kw_only=True, slots=True)
class GroupHealthConfig(RolloutHealthConfig):
    """When a step counts as bad, and when a run stops because of bad steps."""

    max_equal_groups: float = option(0.99, at_least=0, at_most=1)
    """A step is bad if, for more than this share of its prompts, all samples got the same reward (with gdpo, each
    reward separately)."""
