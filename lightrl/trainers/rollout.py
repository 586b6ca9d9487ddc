"""What trainers share that learn from their own samples: prompts, rollouts, the engine beside the model."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from lightrl.config import RolloutConfig, describe_batches
from lightrl.data.media import media_folder
from lightrl.data.prompts import MediaFields, build_prompts
from lightrl.data.sampler import PromptSampler, shard
from lightrl.engines import check_engine_name
from lightrl.models.lora import WithoutAdapters, add_adapters
from lightrl.models.policy import Policy, check_scores, context_length, load_policy
from lightrl.records import Experience, Prompt
from lightrl.rewards import AnyReward
from lightrl.rewards.reward_set import RewardSet
from lightrl.rollout.collector import Collector
from lightrl.rollout.evaluator import Evaluator
from lightrl.strategy import StrategyBase
from lightrl.trainers.base import StepReport, Trainer


class RolloutTrainer(Trainer):
    """A step rolls out its share of num_prompts prompts, learns from the samples, and gives the engine the weights."""

    config: RolloutConfig
    policy: Policy
    reference: Policy | WithoutAdapters | None

    def __init__(
        self, config: RolloutConfig, *, strategy: StrategyBase | None = None, reward: AnyReward | None = None
    ) -> None:
        check_engine_name(config.engine)
        self.rewards = RewardSet.from_config(config, reward)
        super().__init__(config, strategy=strategy)

    @abstractmethod
    def step(self, prompts: Sequence[tuple[int, Prompt]]) -> StepReport:
        """Rolls out, learns and syncs once. prompts: (position in the step's global batch, prompt), this rank's."""

    @property
    @abstractmethod
    def needs_reference(self) -> bool:
        """Whether the policy is compared with the starting model: a frozen copy, or the policy without its adapters."""

    def take_step(self) -> StepReport:
        batch = [(position, self.prompts[index]) for position, index in enumerate(self.sampler.next_batch())]
        return self.step(shard(batch, self.strategy.comm.rank, self.strategy.comm.world))

    @property
    def eval_every(self) -> int:
        return self.config.eval.every

    def evaluate(self) -> dict[str, float]:
        return self.evaluator.evaluate() if self.eval_prompts else {}

    def describe_batches(self) -> str:
        return describe_batches(self.config, self.strategy.comm.world)

    def state_dict(self) -> dict[str, Any]:
        return {"sampler": self.sampler.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.sampler.load_state_dict(state["sampler"])

    def sync_engine(self) -> None:
        """Gives the engine the weights that this step ended with; their version is the number of steps done."""
        strategy = self.strategy
        freed = strategy.engine.freed_bytes if strategy.engine is not None else 0
        with self.watch.measure("time/sync"), strategy.comm.phase("weight sync"):
            strategy.set_global_step(self.step_index + 1)
            strategy.update_engine_weights(self.policy)
        report = strategy.last_sync
        assert report is not None
        found = {"gb": report.num_bytes / 1e9, "gb_per_s": report.gb_per_s, "version": float(report.version)}
        found |= {} if report.canary is None else {"canary_max_abs": report.canary}
        for name, value in found.items():
            self.statistics.highest(f"sync/{name}", value)
        self.statistics.highest("memory/engine_freed_gb", freed / 1e9)
        if self.config.offload_while_generating:
            self.statistics.highest("memory/offloaded_gb", strategy.residency.offloaded_bytes / 1e9)

    def log_samples(self, experience: Sequence[Experience]) -> None:
        """The first samples by position, whatever rank made them."""
        wanted = self.config.log.samples_per_step
        if not wanted:
            return
        gathered = self.strategy.comm.all_gather_object(list(experience[:wanted]))
        if self.strategy.comm.is_main:
            everything = [item for part in gathered for item in part]
            everything.sort(key=lambda item: (item.sample.position, item.sample.sample_index))
            self.folder.append_samples(self.step_index, everything[:wanted])

    # ---- Set-up ------------------------------------------------------------------------------------------------

    def read_data(self, train: list[Any], evaluation: list[Any]) -> None:
        self.prompts = self._prompts(train, self.config.train_data)
        self.eval_prompts = self._prompts(evaluation, self.config.eval_data)[: self.config.eval.max_prompts or None]
        self.sampler = PromptSampler(len(self.prompts), self.config.num_prompts, self.config.seed)

    def _prompts(self, records: list[Any], source: str) -> list[Prompt]:
        if not records:
            return []
        config = self.config
        context = context_length(self.model_path, trust_remote_code=config.trust_remote_code)
        if context <= config.max_new_tokens:
            raise ValueError(
                f"--max_new_tokens {config.max_new_tokens} leaves no room for a prompt in the model's context of "
                f"{context} tokens."
            )
        prompts = build_prompts(
            records,
            self.tokenizer,
            prompt_field=config.data.prompt_field,
            answer_field=config.data.answer_field,
            max_prompt_tokens=context - config.max_new_tokens,
            chat_template=config.data.chat_template,
            media=MediaFields(
                image_field=config.data.image_field,
                video_field=config.data.video_field,
                folder=media_folder(source),
                processor=self.media,
            ),
        )
        longest = max(prompt.num_tokens for prompt in prompts) + config.max_new_tokens
        if not config.micro_batch_size and longest > config.max_tokens_per_microbatch:
            raise ValueError(
                f"--max_tokens_per_microbatch {config.max_tokens_per_microbatch} cannot hold the longest prompt with "
                f"--max_new_tokens {config.max_new_tokens}: raise it to at least {longest}, or give --micro_batch_size."
            )
        return prompts

    def build_models(self) -> Policy:
        config, strategy = self.config, self.strategy
        with strategy.init_model_context(), strategy.comm.phase("loading the model", local=True):
            policy = self.load_policy(is_reference=False)
        (actor, self.optimizer, self.scheduler), *_ = strategy.prepare_models_and_optimizers(
            policy, None, None, None, strategy.args, config.policy_schedule_length
        )
        self.policy = actor
        self.reference = WithoutAdapters(actor) if self.needs_reference and config.lora.is_on else None
        if self.needs_reference and self.reference is None:
            # Only now: before the policy was sharded, rank 0 would have held both models whole.
            with strategy.comm.phase("loading the reference model", local=True):
                reference = self.load_policy(is_reference=True)
            self.reference = strategy.prepare(reference, is_rlhf=True)
        return self.policy

    def load_policy(self, *, is_reference: bool) -> Policy:
        """On this rank, not yet prepared."""
        policy = load_policy(
            self.model_path,
            materialize=self.strategy.materializes_weights,
            trust_remote_code=self.config.trust_remote_code,
            is_reference=is_reference,
        )
        if not is_reference:
            add_adapters(policy.hf, self.config.lora, seed=self.config.seed)
        if self.strategy.materializes_weights and not is_reference:
            check_scores(policy, next(policy.parameters()).device)
        return policy

    def get_ready(self) -> None:
        config = self.config
        self.rewards.prepare(self.strategy)
        self.strategy.setup_inference_engine(config, config.engine, actor=self.policy)
        self.strategy.maybe_sleep_inference_engine()
        self.collector = Collector(self.strategy, self.rewards, seed=config.seed, max_new_tokens=config.max_new_tokens)
        self.evaluator = Evaluator(
            self.strategy, self.collector, self.eval_prompts, temperature=config.eval.temperature
        )

    def close(self) -> None:
        self.rewards.close()
        super().close()
