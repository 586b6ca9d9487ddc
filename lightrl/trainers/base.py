"""The loop around a trainer's step(): set-up, evaluation, logging, checkpoints, resume."""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightrl.builtin import model as builtin_model
from lightrl.config import BUILTIN_MODEL, GRPOConfig, describe_batches
from lightrl.data.media import PromptEncoder, media_folder
from lightrl.data.prompts import MediaFields, build_prompts, load_records
from lightrl.data.sampler import PromptSampler, shard
from lightrl.engines import check_engine_name
from lightrl.metrics import Statistics, Stopwatch, memory_in_use
from lightrl.models.load import check_model_folder, context_length, load_policy, load_tokenizer
from lightrl.models.multimodal import MediaProcessor
from lightrl.models.policy import Policy, check_scores
from lightrl.records import Experience, Prompt
from lightrl.rewards import AnyReward, load_reward
from lightrl.rollout.collector import Collector
from lightrl.rollout.evaluator import Evaluator
from lightrl.strategy import StrategyBase, create_strategy
from lightrl.trainers.console import RunConsole
from lightrl.trainers.run_folder import RunFolder, find_checkpoint, new_run_path

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """What a step gives the loop."""

    metrics: dict[str, float]  # over all ranks
    experience: Sequence[Experience]  # of this rank


class Trainer(ABC):
    """Builds everything a config names and runs steps. Construction stops at the first thing that is wrong."""

    def __init__(
        self, config: GRPOConfig, *, strategy: StrategyBase | None = None, reward: AnyReward | None = None
    ) -> None:
        self.config = config
        check_engine_name(config.engine)
        reward = reward or load_reward(config.reward)
        self.strategy = strategy or create_strategy(config)
        self.strategy.setup_distributed()
        self.step_index = 0
        self.statistics = Statistics()
        self.watch = Stopwatch()
        self.folder, self._checkpoint = self._open_folder()
        with self.strategy.comm.phase("set-up", local=True):
            if self._checkpoint is not None and not self._checkpoint.is_dir():
                raise FileNotFoundError(f"{self._checkpoint} is not there for every rank: use a folder that all see.")
            train_records, eval_records = self._records()
        self._model_path = self._find_model()
        with self.strategy.comm.phase("set-up", local=True):
            self.tokenizer = load_tokenizer(self._model_path, trust_remote_code=config.trust_remote_code)
            self.media = MediaProcessor.load(self._model_path, trust_remote_code=config.trust_remote_code)
            self.encoder = PromptEncoder(self.media) if self.media is not None else None
            self.prompts = self._prompts(train_records, config.train_data)
            self.eval_prompts = self._prompts(eval_records, config.eval_data)[: config.eval.max_prompts or None]
        self.sampler = PromptSampler(len(self.prompts), config.num_prompts, config.seed)
        self.policy, self.optimizer, self.scheduler, self.reference = self._models()
        self.strategy.tokenizer = self.tokenizer
        self.strategy.media = self.media
        with self.strategy.comm.phase("set-up"):
            self._resume()
            self.strategy.set_global_step(self.step_index)
            self.strategy.setup_inference_engine(config, config.engine, actor=self.policy)
            self.strategy.maybe_sleep_inference_engine()
        self.collector = Collector(self.strategy, reward, seed=config.seed, max_new_tokens=config.max_new_tokens)
        self.evaluator = Evaluator(
            self.strategy, self.collector, self.eval_prompts, temperature=config.eval.temperature
        )

    @abstractmethod
    def step(self, prompts: Sequence[tuple[int, Prompt]]) -> StepReport:
        """Rolls out, learns and syncs once."""

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

    # ---- Set-up ------------------------------------------------------------------------------------------------

    def _open_folder(self) -> tuple[RunFolder, Path | None]:
        """Rank 0 looks and decides, and what is wrong is raised on all: ranks may see different files."""
        comm = self.strategy.comm
        found: tuple[Path, Path | None] | str = ""
        if comm.is_main:
            try:
                root = Path(self.config.output_dir) if self.config.output_dir else new_run_path("grpo")
                folder = RunFolder(root.absolute())
                folder.check(self.config)
                found = folder.root, find_checkpoint(self.config, folder.checkpoints)
            except (ValueError, OSError) as error:
                found = str(error)
        found = comm.broadcast_object(found)
        if isinstance(found, str):
            raise ValueError(found)
        return RunFolder(found[0]), found[1]

    def _records(self) -> tuple[list[Any], list[Any]]:
        train = load_records(self.config.train_data)
        eval_source = self.config.eval_data
        if not eval_source and self.config.train_data == BUILTIN_MODEL:
            eval_source = f"{BUILTIN_MODEL}-heldout"
        return train, load_records(eval_source) if eval_source else []

    def _find_model(self) -> str:
        """The path or name to load; the built-in model is made by rank 0 while the others wait."""
        if self.config.model != BUILTIN_MODEL:
            with self.strategy.comm.phase("set-up", local=True):
                check_model_folder(self.config.model)
            return self.config.model
        path = ""
        with self.strategy.comm.phase("building the built-in model", local=True):
            if self.strategy.comm.is_main:
                path = str(builtin_model.builtin_model_path(on_progress=self.strategy.print))
        return self.strategy.comm.broadcast_object(path)

    def _prompts(self, records: list[Any], source: str) -> list[Prompt]:
        if not records:
            return []
        config = self.config
        context = context_length(self._model_path, trust_remote_code=config.trust_remote_code)
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

    def _models(self) -> tuple[Policy, Any, Any, Policy | None]:
        config, strategy = self.config, self.strategy
        with strategy.init_model_context(), strategy.comm.phase("loading the model", local=True):
            policy = self._load(is_reference=False)
        total_updates = config.max_steps * config.optimizer_steps_per_step
        (actor, optimizer, scheduler), *_ = strategy.prepare_models_and_optimizers(
            policy, None, None, None, strategy.args, total_updates
        )
        if config.algorithm.kl_coef == 0:
            return actor, optimizer, scheduler, None
        # Only now: before the policy was sharded, rank 0 would have held both models whole.
        with strategy.comm.phase("loading the reference model", local=True):
            reference = self._load(is_reference=True)
        return actor, optimizer, scheduler, strategy.prepare(reference, is_rlhf=True)

    def _load(self, *, is_reference: bool) -> Policy:
        policy = load_policy(
            self._model_path,
            materialize=self.strategy.materializes_weights,
            trust_remote_code=self.config.trust_remote_code,
            is_reference=is_reference,
        )
        if self.strategy.materializes_weights and not is_reference:
            check_scores(policy, next(policy.parameters()).device)
        return policy

    def _resume(self) -> None:
        if self._checkpoint is None:
            return
        _, state = self.strategy.load_ckpt(self.policy, str(self._checkpoint.parent), tag=self._checkpoint.name)
        self.step_index = int(state["step"])
        self.sampler.load_state_dict(state["sampler"])

    # ---- The loop ----------------------------------------------------------------------------------------------

    def fit(self) -> dict[str, float]:
        """Trains to max_steps; returns the last step's metrics."""
        config, comm = self.config, self.strategy.comm
        with comm.phase("set-up", local=True):
            if comm.is_main:
                self.folder.open(config, self.step_index)
        board = self._tensorboard()
        metrics: dict[str, float] = {}
        with RunConsole(enabled=comm.is_main, first_step=self.step_index, max_steps=config.max_steps) as console:
            self._announce(console)
            if self.step_index == 0:
                metrics = self._evaluate(console)
                self._log(board, 0, metrics)
            while self.step_index < config.max_steps:
                metrics = self._one_step(console)
                self._log(board, self.step_index, metrics)
                if self._is_due(config.checkpoint.every):
                    self._save()
        self._finish(board, console)
        return metrics

    def _announce(self, console: RunConsole) -> None:
        world = self.strategy.comm.world
        console.say(f"run folder: {self.folder.root}")
        console.say(describe_batches(self.config, world))
        if self.step_index:
            console.say(f"continuing after step {self.step_index} from {self._checkpoint}")

    def _one_step(self, console: RunConsole) -> dict[str, float]:
        started = time.perf_counter()
        batch = [(position, self.prompts[index]) for position, index in enumerate(self.sampler.next_batch())]
        report = self.step(shard(batch, self.strategy.comm.rank, self.strategy.comm.world))
        seconds = time.perf_counter() - started
        self.step_index += 1
        metrics = dict(report.metrics)
        metrics |= self.watch.take()
        metrics["time/step"] = seconds
        metrics["tokens/per_second"] = (metrics["tokens/prompt"] + metrics["tokens/response"]) / seconds
        metrics |= memory_in_use()
        self._log_samples(report.experience)
        console.step_done(self.step_index, metrics)
        if self._is_due(self.config.eval.every):
            metrics |= self._evaluate(console)
        return metrics

    def _is_due(self, every: int) -> bool:
        return every > 0 and (self.step_index % every == 0 or self.step_index == self.config.max_steps)

    def _evaluate(self, console: RunConsole) -> dict[str, float]:
        if not self.eval_prompts or self.config.eval.every == 0:
            return {}
        with self.watch.measure("time/eval"):
            metrics = self.evaluator.evaluate()
        console.evaluated(self.step_index, metrics)
        return metrics | dict(self.watch.take())

    # ---- Output ------------------------------------------------------------------------------------------------

    def _tensorboard(self) -> Any:
        if not self.strategy.comm.is_main or not self.config.log.tensorboard:
            return None
        from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415  (slow to import, and only one rank needs it)

        return SummaryWriter(str(self.folder.root / "tensorboard"), purge_step=self.step_index + 1)

    def _log(self, board: Any, step: int, metrics: dict[str, float]) -> None:
        """Step 0 is the evaluation before any training; step n is what the n-th step did."""
        if not self.strategy.comm.is_main or not metrics:
            return
        self.folder.append_metrics(step, metrics)
        if board is not None:
            for name, value in metrics.items():
                board.add_scalar(name, value, step)

    def _log_samples(self, experience: Sequence[Experience]) -> None:
        """The first samples by position, whatever rank made them."""
        wanted = self.config.log.samples_per_step
        if not wanted:
            return
        gathered = self.strategy.comm.all_gather_object(list(experience[:wanted]))
        if self.strategy.comm.is_main:
            everything = [item for part in gathered for item in part]
            everything.sort(key=lambda item: (item.sample.position, item.sample.sample_index))
            self.folder.append_samples(self.step_index, everything[:wanted])

    def _save(self) -> None:
        with self.watch.measure("time/checkpoint"):
            self.strategy.set_global_step(self.step_index)
            self.strategy.save_ckpt(
                self.policy,
                str(self.folder.checkpoints),
                max_num=self.config.checkpoint.keep,
                max_mem=0,
                client_state={"step": self.step_index, "sampler": self.sampler.state_dict()},
            )

    def _finish(self, board: Any, console: RunConsole) -> None:
        self.strategy.save_pretrained(self.policy, self.folder.final)
        if self.strategy.comm.is_main:
            saved = self.tokenizer if self.media is None else self.media.processor
            saved.save_pretrained(self.folder.final)
            console.final_table(self.folder.metrics())
            console.say(f"model: {self.folder.final}")
        if board is not None:
            board.close()

    def close(self) -> None:
        """Ends the engine and leaves the process group."""
        self.strategy.close()
