"""The objective that a run's config names: the loss of a micro-batch, and the advantages of scored samples.

The chosen functions are loaded before anything expensive, and called once on two tokens if they are a user's own or
have parameters, so that a wrong name or parameter raises at once. Their traits decide which arguments they get.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias, TypedDict

import torch
from torch import Tensor

from lightrl.algorithms.advantages import (
    Component,
    ScoredSamples,
    merged_moments,
    moments_of,
    signal_counts,
    whiten,
)
from lightrl.algorithms.corrections import Correction, OffPolicyTokens
from lightrl.algorithms.losses import PolicyTokens, TokenLoss, TokenWeights, mean_loss
from lightrl.algorithms.registry import (
    BUILTIN,
    AdvantageTraits,
    Kind,
    LossTraits,
    find,
    load,
    parameters_of,
    traits_of,
)
from lightrl.comm import Comm
from lightrl.config import AlgorithmConfig, DistillationConfig, RoutingConfig, named_values
from lightrl.metrics import Statistics
from lightrl.records import Experience, PackedBatch, TokenScores
from lightrl.rewards.scoring import has_reward
from lightrl.trainers.coefficients import Coefficients
from lightrl.trainers.loss_terms import LossTerm, MicroBatch, optional_terms
from lightrl.trainers.own_advantage import OwnAdvantage
from lightrl.trainers.own_function import OwnFunction
from lightrl.trainers.router_terms import RouterTerm
from lightrl.trainers.token_selection import needs_selection

if TYPE_CHECKING:
    from typing_extensions import Unpack

OwnOptions: TypeAlias = Mapping[str, float | None]  # parameters that have options of their own; None is not passed
Trial: TypeAlias = Callable[[], tuple[Any, ...]]  # makes the arguments for a trial call
_RESULTS: Mapping[Kind, str] = {
    "advantage": "a tensor with one number per sample",
    "returns": "TokenReturns",
    "loss": "TokenLoss, as token_loss() makes it",
    "aggregation": "TokenWeights",
    "correction": "Correction",
    "kl_estimator": "a tensor with one number per token",
}

# Options that choose and bind the functions of every run. Any other may add a term to the loss, or a target.
_OF_FUNCTIONS = ["advantage", "advantage_args", "loss", "loss_args", "clip_low", "clip_high"]
_OF_FUNCTIONS += ["aggregation", "aggregation_args"]


class LossParts(TypedDict, total=False):
    """A trainer's additions to the loss that the options of the algorithm describe."""

    kl_in_loss: bool  # False: the loss only measures the KL to the reference, which is in the rewards
    distillation: DistillationConfig | None  # how a teacher is followed; None without a teacher
    has_selector: bool  # whether the trainer chooses tokens over a whole update, by a TokenSelector
    routing: RoutingConfig  # the options for the routers of a mixture of experts


@dataclass
class FixedCoefficients:
    """The coefficients of KL and entropy if they follow no target."""

    kl: float
    entropy: float

    def state_dict(self) -> dict[str, float]:
        """Returns the coefficients, for a run that continues from the checkpoint with a target."""
        return {"kl": self.kl, "entropy": self.entropy, "entropy_kept": self.entropy}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Ignores the state: the coefficients are those of this run's config."""


class PolicyLoss:
    """The loss of the policy over a micro-batch: a policy loss, its optional terms, and an aggregation."""

    coefficients: Coefficients | FixedCoefficients

    def __init__(self, config: AlgorithmConfig, **parts: Unpack[LossParts]) -> None:
        """Loads and tries the functions that the config names."""
        bounds = {"clip_low": config.clip_low, "clip_high": config.clip_high}
        self._policy_loss: Callable[[PolicyTokens], TokenLoss] = load_and_try(
            "loss", config.loss, config.loss_args, _two_tokens, given=bounds
        )
        self._aggregate: Callable[[Tensor, Tensor, int], TokenWeights] = load_and_try(
            "aggregation", config.aggregation, config.aggregation_args, _mask_of_two
        )
        self.needs_selection = False  # whether a TokenSelector must choose tokens over a whole update
        self.selects_tokens = traits_of(self._policy_loss, LossTraits).selects_tokens is not None
        self.coefficients = FixedCoefficients(config.kl_coef, config.entropy_coef)
        self.ratio_to = "recompute"  # the other policy of the ratio: here the one before the update
        self._terms: list[LossTerm] = []
        plain = AlgorithmConfig(**{name: getattr(config, name) for name in _OF_FUNCTIONS})
        if config != plain or self.selects_tokens or parts.get("distillation"):
            self._add_terms(config, **parts)
        if (routing := parts.get("routing")) and routing.is_on:
            self._terms.append(RouterTerm(routing))

    def _add_terms(self, config: AlgorithmConfig, **parts: Unpack[LossParts]) -> None:
        distillation = parts.get("distillation")
        self.ratio_to = config.ratio_to
        if needs_selection(config):
            self._check_selection(config, distillation, parts.get("has_selector", False))
            self.needs_selection = True
        follows = config.kl_target or config.entropy_target
        if follows:
            self.coefficients = Coefficients(config)
        corrects = config.used_correction != "none" or bool(config.correction_args)
        weighs = config.entropy_fraction < 1 or corrects or bool(config.off_policy_mask)
        if weighs or config.kl_coef or config.entropy_coef or follows or distillation:
            self._terms = optional_terms(
                config,
                self.coefficients,
                correct=_correction(config) if corrects else None,
                estimate_kl=_kl_estimator(config) if config.kl_coef else None,
                kl_in_loss=parts.get("kl_in_loss", True),
                distillation=distillation,
            )

    def _check_selection(
        self, config: AlgorithmConfig, distillation: DistillationConfig | None, has_selector: bool
    ) -> None:
        if not has_selector:
            raise _nothing_selects(config)
        if self.selects_tokens and distillation is not None and distillation.kind == "advantage":
            raise _selects_before_the_teacher(config)

    def weight(self, batch: PackedBatch) -> Tensor:
        """Returns the micro-batch's part of the denominator, for train_batch."""
        return self.token_weights(batch).total

    def token_weights(self, batch: PackedBatch) -> TokenWeights:
        """Returns the weights of the micro-batch's tokens."""
        return self._aggregate(batch.loss_mask, batch.sequence_index, len(batch.keys))

    def loss(self, scores: TokenScores, batch: PackedBatch, statistics: Statistics) -> Tensor:
        """Returns the mean over the micro-batch, which train_batch turns into the mean over all of them."""
        tokens = PolicyTokens(
            logprobs=scores.logprobs,
            old_logprobs=scores.logprobs.detach() if batch.old_logprobs is None else batch.old_logprobs,
            advantages=batch.advantages,
            mask=batch.loss_mask,
            sequence_index=batch.sequence_index,
            num_sequences=len(batch.keys),
            selected=batch.selected if self.selects_tokens else None,
        )
        for term in self._terms:
            tokens = term.prepare(tokens, batch)
        policy = self._policy_loss(tokens)
        _report(policy, scores.entropy, tokens.mask, statistics)
        for term in self._terms:
            policy = term.apply(policy, MicroBatch(tokens=tokens, scores=scores, batch=batch, statistics=statistics))
        return mean_loss(policy.terms, self.token_weights(batch))


class PolicyObjective(PolicyLoss):
    """The loss, and the way from the rewards of samples to their advantages."""

    def __init__(self, config: AlgorithmConfig, *, group_size: int | None = None, **parts: Unpack[LossParts]) -> None:
        """Loads and tries the functions that the config names.

        Args:
            group_size: Samples of each prompt; ValueError if the advantages need more. None skips the check.
            parts: As for PolicyLoss, by the names of LossParts.
        """
        super().__init__(config, **parts)
        self._estimate: Callable[[ScoredSamples], Tensor] = load_and_try(
            "advantage", config.advantage, config.advantage_args, _two_samples
        )
        self.traits = traits_of(self._estimate, AdvantageTraits)
        if group_size is not None:
            self._check_group(config.advantage, group_size)

    def _check_group(self, name: str, group_size: int) -> None:
        wanted = self.traits.min_group
        smallest = wanted if isinstance(wanted, int) else max(2, parameters_of(self._estimate)[wanted])
        if group_size < smallest:
            raise _small_group(name, wanted, smallest, group_size)

    def advantages(
        self, experience: Sequence[Experience], comm: Comm, baselines: Sequence[float] | None = None
    ) -> list[Experience]:
        """Returns this rank's scored samples that have a reward, each with its advantage.

        Groups must be whole on a rank. Every rank must call it, even without samples. The reward of a sample that is
        not trained still counts in its group's mean.

        Args:
            experience: The scored samples of this rank; NO_REWARD leaves one out.
            comm: For estimators that whiten or need statistics of all ranks' samples; others use no collective.
            baselines: The reward of the greedy response to each sample's prompt.
        """
        if baselines is not None:
            experience, baselines = _having_baselines(experience, baselines)
        kept = [item for item in experience if has_reward(item.reward)]
        scored = ScoredSamples(
            rewards=_doubles(item.reward + item.shaping for item in kept),
            group_ids=torch.tensor([item.sample.position for item in kept], dtype=torch.int64),
            lengths=_doubles(item.num_trained for item in kept),
            baselines=None if baselines is None else _doubles(baselines),
        )
        if self.traits.needs:
            scored = self._with_needed(scored, comm, kept)
        advantages = self._estimate(scored).double() if kept else scored.rewards
        if self.traits.whiten:  # over all ranks, including those without samples
            advantages = self._whitened(advantages, scored, comm)
        return [replace(item, advantage=amount) for item, amount in zip(kept, advantages.tolist(), strict=True)]

    def _with_needed(self, scored: ScoredSamples, comm: Comm, experience: Sequence[Experience]) -> ScoredSamples:
        if "signal_share" in self.traits.needs:
            scored = replace(scored, signal_share=_signal_share(scored, comm))
        if "components" in self.traits.needs:
            scored = replace(scored, components=components_of(experience))
        return scored

    def _whitened(self, advantages: Tensor, scored: ScoredSamples, comm: Comm) -> Tensor:
        assert scored.lengths is not None
        return whiten(advantages, merged_moments(comm.all_gather(moments_of(advantages, scored.lengths)[None])))


def load_and_try(
    kind: Kind, name: str, args: Sequence[str], trial: Trial, option: str = "", given: OwnOptions | None = None
) -> Callable[..., Any]:
    """Loads the function that --algorithm.<kind> names and calls it once, so that a bad parameter raises at once.

    A built-in function that is left at its defaults needs no trial.

    Args:
        name: Its name or path.
        args: Its parameters as name=value.
        trial: Returns the arguments of the trial call.
        option: The option that names it, if not the kind.
        given: Parameters that have options of their own; None leaves one to the function's default.
    """
    given = {key: value for key, value in (given or {}).items() if value is not None}
    if not args and not given and name in BUILTIN[kind]:
        function = find(kind, name)
        if inspect.Parameter.empty not in parameters_of(function).values():
            return function
    return _load_with(kind, name, args, trial, f"algorithm.{option or kind}", given)


def _load_with(
    kind: Kind, name: str, args: Sequence[str], trial: Trial, option: str, given: OwnOptions
) -> Callable[..., Any]:
    parameters = named_values(args, f"{option}_args") if args else {}
    if parameters.keys() & given.keys():
        raise _given_twice(given, parameters, option)
    try:
        function, arguments = load(kind, name, {**parameters, **given}), trial()
        result = function(*arguments)
        _check_result(kind, result)
        own = function if name in BUILTIN[kind] else OwnFunction.of(f"--{option} {name}", function, type(result))
        if isinstance(own, OwnFunction):
            own.check(result, arguments[0])
    except (ValueError, TypeError, ZeroDivisionError, RuntimeError) as error:
        raise _failed_trial(str(error), f"--{option}", name, parameters, given) from error
    return OwnAdvantage.of(name, function) if kind == "advantage" and own is not function else own


def _check_result(kind: Kind, result: object) -> None:
    """Raises TypeError for what a function often returns by mistake: nothing, a list, or a tensor of another kind."""
    is_wrong = result is None or isinstance(result, Tensor | list | float)
    if kind in ("advantage", "kl_estimator"):
        is_wrong = not (isinstance(result, Tensor) and result.shape == (2,))
    if isinstance(result, TokenLoss) and not result.terms.requires_grad:
        raise TypeError("its terms have no gradient. Compute them from tokens.logprobs, without detach() or no_grad().")
    if is_wrong:
        given = f"a tensor of shape {list(result.shape)}" if isinstance(result, Tensor) else type(result).__name__
        raise TypeError(f"for two samples or tokens it returned {given}, and it must return {_RESULTS[kind]}.")


def _correction(config: AlgorithmConfig) -> Callable[[OffPolicyTokens], Correction]:
    correction = config.used_correction
    if correction == "none":
        raise ValueError("--algorithm.correction_args are given, but --algorithm.correction is none.")
    if config.ratio_to == "engine":
        option = "old_logprobs engine" if config.old_logprobs == "engine" else "proximal sampler"
        raise ValueError(
            f"--algorithm.correction {correction} weighs by the trainer's probability over the engine's, which "
            f"--algorithm.{option} puts into the ratio already. Use one of the two."
        )
    return load_and_try("correction", correction, config.correction_args, _two_off_policy_tokens)


def _kl_estimator(config: AlgorithmConfig) -> Callable[[Tensor, Tensor], Tensor]:
    return load_and_try("kl_estimator", config.kl_estimator, config.kl_estimator_args, _two_logprobs)


# ---- Trials ----------------------------------------------------------------------------------------------------------


def _mask_of_two() -> tuple[Tensor, Tensor, int]:
    return torch.ones(2).bool(), torch.zeros(2).long(), 1


def _two_tokens() -> tuple[PolicyTokens]:
    zeros, (mask, owners, _) = torch.zeros(2), _mask_of_two()
    tokens = PolicyTokens(
        logprobs=zeros.clone().requires_grad_(),
        old_logprobs=zeros,
        advantages=zeros,
        mask=mask,
        sequence_index=owners,
        num_sequences=1,
        selected=mask,
    )
    return (tokens,)


def _two_off_policy_tokens() -> tuple[OffPolicyTokens]:
    zeros, (mask, owners, _) = torch.zeros(2), _mask_of_two()
    tokens = OffPolicyTokens(logprobs=zeros, sampler_logprobs=zeros, mask=mask, sequence_index=owners, num_sequences=1)
    return (tokens,)


def _two_logprobs() -> tuple[Tensor, Tensor]:
    return torch.tensor([-1.0, -2.0], requires_grad=True), torch.tensor([-2.0, -1.0])


def _two_samples() -> tuple[ScoredSamples]:
    two = torch.tensor([0.0, 1.0], dtype=torch.float64)  # as a run's rewards: an estimator in float32 must fail here
    samples = ScoredSamples(
        rewards=two,
        group_ids=torch.zeros(2).long(),
        lengths=torch.ones_like(two),
        baselines=two,
        signal_share=1.0,
        components={"one": Component(two, 1.0)},
    )
    return (samples,)


# ---- Numbers ---------------------------------------------------------------------------------------------------------


def _report(policy: TokenLoss, entropy: Tensor, mask: Tensor, statistics: Statistics) -> None:
    """Adds the metrics of the policy loss before any term changes it; the KL stays 0 unless its term adds to it."""
    count = int(mask.sum())
    means = {"clip_fraction": policy.is_clipped, "ratio/mean": policy.ratio, "entropy": torch.where(mask, entropy, 0.0)}
    for name, values in {"kl": torch.zeros(()), **means, **policy.metrics}.items():
        statistics.mean(name, float(values.detach().sum()), count)
    statistics.maximum("ratio/max", float(policy.ratio.detach().max()) if policy.ratio.numel() else 0.0)


def _having_baselines(
    experience: Sequence[Experience], baselines: Sequence[float]
) -> tuple[list[Experience], list[float]]:
    pairs = [pair for pair in zip(experience, baselines, strict=True) if has_reward(pair[0].reward)]
    known = [(item, baseline) for item, baseline in pairs if has_reward(baseline)]
    return [item for item, _ in known], [baseline for _, baseline in known]


def _signal_share(scored: ScoredSamples, comm: Comm) -> float:
    """Returns the share of all ranks' samples whose group has unequal rewards."""
    with_signal, total = comm.all_reduce(signal_counts(scored), "sum").tolist()
    return with_signal / total if total else 0.0


def components_of(experience: Sequence[Experience]) -> dict[str, Component]:
    """Returns the values of each reward for the samples, and the shaping of their rewards as one more."""
    if any(not item.sample.components for item in experience):
        raise ValueError(
            "There are samples without the values of their single rewards, which the advantage needs. Take them from "
            "GRPOTrainer.make_groups(), or from a record of such a run."
        )
    weights = {label: pair[0] for item in experience for label, pair in sorted(item.sample.components.items())}
    found = {
        label: Component(_doubles(item.sample.components.get(label, (0.0, math.nan))[1] for item in experience), weight)
        for label, weight in sorted(weights.items())
    }
    return {**found, "": Component(_doubles(item.shaping for item in experience), 1.0)}


def _doubles(values: Iterable[float]) -> Tensor:
    return torch.tensor(list(values), dtype=torch.float64)


# ---- Errors ----------------------------------------------------------------------------------------------------------


def _given_twice(given: OwnOptions, parameters: Mapping[str, Any], option: str) -> ValueError:
    name = min(parameters.keys() & given.keys())
    return ValueError(
        f"--algorithm.{name} {given[name]} and --{option}_args {name}={parameters[name]} set the same bound: give one "
        "of them."
    )


def _failed_trial(reason: str, option: str, name: str, parameters: Mapping[str, Any], given: OwnOptions) -> ValueError:
    """Names the options for the parameters that the reason mentions, or all parameters if it mentions none."""
    sources = [f"--algorithm.{key}" for key in given if key in reason]
    if parameters and (not sources or any(key in reason for key in parameters)):
        sources.append(f"{option}_args")
    return ValueError(f"{' and '.join(sources) or f'{option} {name}'}: {reason}")


def _nothing_selects(config: AlgorithmConfig) -> ValueError:
    return ValueError(
        f"--algorithm.loss {config.loss}, selection_args {list(config.selection_args)} and entropy_fraction "
        f"{config.entropy_fraction}: one of them needs tokens that are chosen over a whole update, which this "
        "trainer does not do; train_grpo does."
    )


def _selects_before_the_teacher(config: AlgorithmConfig) -> ValueError:
    return ValueError(
        f"--algorithm.loss {config.loss} selects tokens by the advantages of their rewards, to which "
        "--distillation.kind advantage adds. Give --distillation.kind loss."
    )


def _small_group(name: str, wanted: int | str, smallest: int, group_size: int) -> ValueError:
    if isinstance(wanted, int):
        return ValueError(
            f"--group_size is {group_size}: {name} compares the samples of a prompt with each other and needs at least "
            f"{smallest}. Use {smallest if smallest > 4 else 4} to {max(16, 2 * smallest)}."
        )
    return ValueError(
        f"--algorithm.advantage {name} draws {wanted}={smallest} of --group_size {group_size}: give at least "
        f"{smallest} samples, or a smaller {wanted} by --algorithm.advantage_args."
    )
