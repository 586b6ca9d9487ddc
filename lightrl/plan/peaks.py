"""Lists, phase by phase, what the fullest rank of a run has on its device, and for what."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from lightrl.config import DPOConfig, GRPOConfig, PPOConfig, RMConfig, RolloutConfig, RunConfig
from lightrl.config.adapters import sends_adapters
from lightrl.models import logprobs
from lightrl.plan.activations import Computation, Pass, Settings, needs_of
from lightrl.plan.adapters import EngineAdapters, described_adapters
from lightrl.plan.batches import Batches, batches_of, flops_of_step, passes_of
from lightrl.plan.engine import Engine, engine_of
from lightrl.plan.models import FLOAT, SCORER, Model, critic_of, policy_of, reward_model_of, scorer_of
from lightrl.plan.shared_prompts import describe_sharing, sharing_of, with_shared_prompts
from lightrl.plan.spread import Kept, kept_of, num_trainers, strategy_name
from lightrl.plan.stages import StageNeed, stage_need


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The machine that the run must fit on."""

    ranks: int
    memory: float  # bytes of a device; 0: unknown
    prompt_tokens: int
    response_tokens: int  # 0: --max_new_tokens
    is_accelerator: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """A part of a step, with the bytes on the device by purpose."""

    name: str
    parts: dict[str, float]

    @property
    def total(self) -> float:
        """The sum of the bytes."""
        return sum(self.parts.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The plan of a run."""

    phases: list[Phase]
    batches: Batches
    flops: float  # per step over all ranks
    host: float  # bytes in host memory per rank
    num_weights: int
    engine: Engine | None
    prompts: str  # says whether prompts are computed once; empty without samples

    @property
    def peak(self) -> Phase:
        """The phase that needs the most memory."""
        return max(self.phases, key=lambda phase: phase.total)


class Models:
    """The models of a run by role, made once for all plans of the run."""

    def __init__(self, hf_config: Any, config: RunConfig, others: dict[str, Any] | None = None) -> None:
        """Takes in `others`, by role, the configs of models that differ from the policy's."""
        others = others or {}
        self.hf_config, self._others, self._lora = hf_config, others, config.lora
        is_classifier = isinstance(config, RMConfig)
        self.policy = reward_model_of(hf_config, config) if is_classifier else policy_of(hf_config, config)
        self.frozen: list[Model] = []
        self.critic: Model | None = None
        if isinstance(config, DPOConfig | RolloutConfig) and not config.lora.is_on:
            self.reference: Model | None = policy_of(hf_config, config, "reference")
        else:
            self.reference = None  # it is the policy without its adapters
        if "teacher" in others:
            self.frozen.append(policy_of(others["teacher"], config, "teacher"))
        self.scorer = scorer_of(others["reward_model"], config) if "reward_model" in others else None
        if self.scorer is not None and not getattr(config, "rollout_ranks", 0):
            self.frozen.append(self.scorer)
        if isinstance(config, PPOConfig) and not config.critic.shared_backbone:
            self.critic = critic_of(others.get("critic", hf_config), config)

    @property
    def all(self) -> list[Model]:
        """The models that a step may use."""
        return [model for model in (self.policy, self.reference, self.critic, *self.frozen) if model is not None]

    @property
    def readers(self) -> list[Model]:
        """The models besides the policy's copies that read each sequence once: a teacher and a reward model."""
        return self.frozen if self.scorer is None or self.scorer in self.frozen else [*self.frozen, self.scorer]

    def of(self, config: RunConfig) -> Models:
        """Returns the models of the same files for other options."""
        return Models(self.hf_config, config, self._others)

    def adapters_of(self, config: RunConfig) -> EngineAdapters | None:
        """Returns the adapters that the engine applies; None if it has none."""
        if not (config.lora.is_on and sends_adapters(config)):
            return None
        is_merged = config.lora.engine == "auto" and config.engine == "vllm" and not self._adapters.in_decoder
        return None if is_merged else self._adapters

    @cached_property
    def _adapters(self) -> EngineAdapters:
        return described_adapters(self._lora, self.policy)


def plan_run(config: RunConfig, models: Models, machine: Machine) -> Plan:
    """Returns the phases of a step in a run whose ranks are all as full as possible."""
    trainers = num_trainers(config, machine.ranks)
    own_ranks = machine.ranks - trainers
    if trainers < 1:
        raise ValueError(f"--rollout_ranks {own_ranks} leaves none of {machine.ranks} ranks to train.")
    batches = batches_of(
        config, ranks=trainers, prompt_tokens=machine.prompt_tokens, response_tokens=machine.response_tokens
    )
    sharing = sharing_of(config, is_accelerator=machine.is_accelerator)
    batches = with_shared_prompts(batches, config, sharing, trainers, models.all)
    engine = None
    if isinstance(config, RolloutConfig):
        engine = engine_of(
            config,
            models.policy,
            batches,
            models.adapters_of(config),
            ranks=own_ranks or trainers,
            trainers=trainers,
            memory=machine.memory,
            is_accelerator=machine.is_accelerator,
        )
    is_staged = strategy_name(config, trainers) == "megatron"
    steps = [
        _Step(config, models, replace(machine, ranks=trainers), batches, engine, stage, is_beside=not own_ranks)
        for stage in (range(config.megatron.pp_size) if is_staged else (None,))
    ]
    step = max(steps, key=lambda step: max(phase.total for phase in step.phases))
    return Plan(
        phases=step.phases,
        batches=batches,
        flops=flops_of_step(config, models.policy, batches, passes_of(config), models.readers, models.critic),
        host=step.host,
        num_weights=sum(weight.numel for weight in models.policy.weights),
        engine=engine,
        prompts=describe_sharing(sharing, batches),
    )


class _Step:
    """Collects the phases of a step, perhaps on a stage of Megatron's pipeline."""

    def __init__(
        self,
        config: RunConfig,
        models: Models,
        machine: Machine,
        batches: Batches,
        engine: Engine | None,
        stage: int | None,
        *,
        is_beside: bool,
    ) -> None:
        self._config, self._models, self._machine, self._batches = config, models, machine, batches
        self._stage = stage
        several = batches.micro_batches > 1
        used = [models.policy, *models.frozen]
        used += [models.reference] if models.reference is not None and self._has_reference else []
        used += [models.critic] if models.critic is not None else []
        self._kept = {model.role: kept_of(model, config, machine.ranks, several=several, stage=stage) for model in used}
        self._used = {model.role: model for model in used}
        self.host = sum(kept.host for kept in self._kept.values())
        self.phases = list(self._all_phases(engine, is_beside=is_beside))

    @property
    def _has_reference(self) -> bool:
        config = self._config
        return isinstance(config, DPOConfig) or (
            isinstance(config, GRPOConfig | PPOConfig) and config.algorithm.kl_coef > 0
        )

    def _all_phases(self, engine: Engine | None, *, is_beside: bool) -> list[Phase]:
        resident = self._resident()
        asleep = {"engine asleep": engine.asleep} if engine is not None and is_beside else {}
        found = [] if engine is None else [self._generate(engine, resident, is_beside)]
        resident = {**resident, **asleep}
        scored = self._used if self._scores_policy else {role: m for role, m in self._used.items() if role != "policy"}
        found += [self._score(role, resident) for role in scored]
        found += [self._train(role, resident) for role in ("critic", "policy") if role in self._used]
        if engine is not None:
            found.append(Phase(name="weight sync", parts={**resident, "sync buckets": engine.sync}))
        return found

    @property
    def _scores_policy(self) -> bool:
        config = self._config
        several = isinstance(config, GRPOConfig | PPOConfig) and config.optimizer_steps_per_step > 1
        return several or (self._has_reference and self._config.lora.is_on)

    def _resident(self, without: str = "") -> dict[str, float]:
        parts: dict[str, float] = {}
        for role, kept in self._kept.items():
            label = "" if role == "policy" else f"{role} "
            parts[f"{label}weights"] = kept.weights
            parts[f"{label}master copies"] = kept.master
            parts[f"{label}optimizer"] = 0 if role == without else kept.optimizer
            parts[f"{label}average"] = kept.average
            parts[f"{label}gradient buffers"] = kept.buffers
        return {name: size for name, size in parts.items() if size}

    def _generate(self, engine: Engine, resident: dict[str, float], is_beside: bool) -> Phase:
        config = self._config
        assert isinstance(config, RolloutConfig)
        leaves = config.offload_while_generating or not is_beside
        if config.offload_while_generating:
            self.host += sum(resident.values())
        awake = {"engine weights": engine.weights, "KV cache": engine.cache, "logits": engine.work}
        awake |= {"adapters": engine.adapters} if engine.adapters else {}
        if not is_beside and (scorer := self._models.scorer) is not None:  # whole on each rank that generates
            whole = replace(config, strategy="single")
            awake["reward model weights"] = kept_of(scorer, whole, 1, several=False).weights
        return Phase(name="generate", parts={**({} if leaves else resident), **awake})

    def _score(self, role: str, resident: dict[str, float]) -> Phase:
        staged = self._stage is not None
        num_bytes = (
            self._stage_need(role, trains=False).first_backward if staged else self._need(role, trains=False).top
        )
        parts = self._activations(role, num_bytes)
        return Phase(name=f"score by {role}", parts={**resident, **parts, "gathered weights": self._kept[role].forward})

    def _train(self, role: str, resident: dict[str, float]) -> Phase:
        config = self._config
        if isinstance(config, PPOConfig) and config.critic.offload_waiting_optimizer:
            other = "policy" if role == "critic" else "critic"
            asleep = {name: size for name, size in resident.items() if name == "engine asleep"}
            resident = {**self._resident(without=other), **asleep}
        chosen = self._pass(role) if self._stage is None else self._staged_pass(role)
        parts = {**resident, **chosen, "gathered weights": self._kept[role].own_pass}
        return Phase(name=f"train {role}", parts={name: size for name, size in parts.items() if size})

    def _pass(self, role: str) -> dict[str, float]:
        """Returns the activations and gradients of a micro-batch at the worst moment."""
        kept, need = self._kept[role], self._need(role, trains=True)
        head = _head_gradient(self._used[role], kept)
        top = {**self._activations(role, need.top), "gradients": max(kept.waiting, head)}
        bottom = {"activations": need.bottom, "gradients": kept.gradients + kept.waiting * (kept.own_pass > 0)}
        if kept.waiting and not kept.own_pass:
            bottom["gradients"] = kept.gradients
        return max(top, bottom, key=lambda parts: sum(parts.values()))

    def _staged_pass(self, role: str) -> dict[str, float]:
        """Returns the activations and gradients of a stage at the worst moment."""
        need, gradients = self._stage_need(role, trains=True), self._kept[role].gradients
        goes_on = self._batches.micro_batches > need.waiting  # a forward follows a backward
        first = {**self._activations(role, need.first_backward), "gradients": gradients if goes_on else 0.0}
        later = {**self._activations(role, need.next_backward), "gradients": gradients}
        return max(first, later, key=lambda parts: sum(parts.values()))

    def _stage_need(self, role: str, *, trains: bool) -> StageNeed:
        assert self._stage is not None
        return stage_need(
            self._used[role],
            self._batches.pack,
            self._config,
            self._stage,
            micro_batches=self._batches.micro_batches,
            trains=trains,
            on_accelerator=self._machine.is_accelerator,
        )

    def _need(self, role: str, *, trains: bool) -> Pass:
        config = self._config
        settings = Settings(
            computation=self._computation,
            checkpointing=config.gradient_checkpointing,
            trains=trains,
            tp_size=config.tp_size,
            sp_size=config.sp_size,
            on_accelerator=self._machine.is_accelerator,
        )
        return needs_of(self._used[role], self._batches.pack_of(role), settings)

    @property
    def _computation(self) -> Computation:
        if self._config.dtype == "float32":
            return "float32"
        return "bfloat16" if strategy_name(self._config, self._machine.ranks) == "fsdp" else "autocast"

    def _activations(self, role: str, num_bytes: float) -> dict[str, float]:
        if role in ("critic", SCORER) or self._stage not in (None, self._config.megatron.pp_size - 1):
            return {"activations": num_bytes}
        chunk = min(num_bytes, self._logits_chunk())
        return {"activations": num_bytes - chunk, "logits chunk": chunk}

    def _logits_chunk(self) -> float:
        """Returns the bytes of a tile of logits, its probabilities and their product."""
        tile = logprobs._ACCELERATOR_TILE if self._machine.is_accelerator else logprobs._CPU_TILE
        rows = self._batches.pack.num_sequences * self._batches.pack.num_scored
        vocabulary = self._models.policy.hf_config.get_text_config().vocab_size
        if self._stage is not None:  # its ranks split both
            rows, vocabulary = rows // self._config.megatron.cp_size, vocabulary // self._config.tp_size
        return float(3 * FLOAT * min(tile[0], rows) * min(tile[1], vocabulary))


def _head_gradient(model: Model, kept: Kept) -> float:
    """Returns the bytes of the gradients that exist when the last block's backward begins."""
    if kept.own_pass:
        return 0.0
    return FLOAT * sum(weight.numel for weight in model.trained if not weight.unit and "embed" not in weight.name)
