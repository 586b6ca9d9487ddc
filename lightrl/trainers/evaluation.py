"""Evaluates any model that can be trained: samples for held-out prompts, scores them, writes one JSON object."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from itertools import chain
from typing import Any, NoReturn

from lightrl.builtin.task import HELD_OUT
from lightrl.config import EvaluateConfig
from lightrl.data.prompts import held_out_of, shorten
from lightrl.records import Sample
from lightrl.rewards import OwnRewards
from lightrl.rewards.reward_set import RewardSet
from lightrl.rollout.collector import Collector
from lightrl.rollout.majority import add_majority
from lightrl.strategy import StrategyBase
from lightrl.trainers.fit import Trainer
from lightrl.trainers.observer import Observer
from lightrl.trainers.policy_step import PromptData, start_engine
from lightrl.trainers.run import RunContext, load_start_policy
from lightrl.wording import counted

_NUM_SHOWN = 3  # number of responses shown on the terminal


class MajorityVotes(Observer):
    """Lets the evaluations of a trainer that samples on its own ranks report maj@k (--eval.majority)."""

    def __init__(self, trainer: Any) -> None:
        if isinstance(trainer.collector, Collector):  # otherwise the collector that it asks does it
            add_majority(trainer.collector, trainer.rewards, trainer.strategy.comm, trainer.config.eval.majority_k)


class Evaluator(Trainer):
    """Samples and scores the prompts of --eval_data once, with the code that evaluates during training."""

    kind = "evaluate"
    config: EvaluateConfig

    def __init__(
        self,
        run: RunContext | EvaluateConfig,
        *,
        strategy: StrategyBase | None = None,
        reward: OwnRewards | None = None,
    ) -> None:
        config: EvaluateConfig = run.config if isinstance(run, RunContext) else run
        if not config.eval_data and not held_out_of(config.train_data):
            raise ValueError(
                f"There are no prompts to evaluate on: {config.train_data} is training data. Give --eval_data, "
                "which may name it, too."
            )
        self.rewards = RewardSet.from_config(config, reward)
        super().__init__(run, strategy=strategy)
        self.prompts = PromptData(self.run)
        with self.strategy.comm.phase("loading the model", local=True):
            policy = load_start_policy(self.run, is_reference=True)
        self.model = self.strategy.prepare_frozen(policy)
        self.collector = start_engine(self.run, self.model, self.rewards)
        if config.eval.majority:
            add_majority(self.collector, self.rewards, self.strategy.comm, config.eval.majority_k)
        self.responses: list[dict[str, Any]] = []  # samples of the last evaluation, on rank 0

    def step(self) -> NoReturn:
        """Raises TypeError, because an evaluation takes no steps."""
        raise TypeError("An evaluation has no steps: call evaluate() or fit().")

    def evaluate(self) -> dict[str, float]:
        """Returns the metrics over all ranks."""
        config = self.config.eval
        return self.collector.evaluate(
            self.prompts.evaluation,
            temperature=config.temperature,
            n=config.n,
            ks=config.k,
            source_field=config.source_field,
            keep=self._keep,
        )

    def fit(self) -> dict[str, float]:
        """Evaluates, prints the result, and writes it and all responses to the folder of the run."""
        metrics = self.evaluate()
        if self.strategy.comm.is_main:
            text = json.dumps(self._result(metrics), indent=2)
            if (data := self._result(metrics)["eval_data"]) in HELD_OUT:
                sys.stderr.write(f"{data} has the prompts of trainings; {HELD_OUT[data]} has those that none sees.\n")
            root = self.folder.root
            root.mkdir(parents=True, exist_ok=True)
            (root / "evaluation.json").write_text(f"{text}\n")
            lines = [json.dumps(row, ensure_ascii=False, default=str) for row in self.responses]
            (root / "responses.jsonl").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
            for row in self.responses[:_NUM_SHOWN]:
                shown = {name: shorten(repr(row[name])) for name in ("prompt", "response", "answer")}
                told = "  ".join(f"{name} {text}" for name, text in shown.items())
                sys.stderr.write(f"{told}  reward {row['reward']}\n")
            sys.stderr.write(f"{counted(len(lines), 'response')}: {root / 'responses.jsonl'}\n")
            sys.stdout.write(f"{text}\n")
        return metrics

    def _keep(self, samples: Sequence[Sample], rewards: Sequence[float]) -> None:
        mine = [
            {
                "position": sample.position,
                "sample": sample.sample_index,
                "prompt": sample.prompt.text,
                "response": sample.text,
                "answer": sample.prompt.answer,
                "reward": reward if math.isfinite(reward) else None,
                "finish_reason": sample.finish_reason,
            }
            for sample, reward in zip(samples, rewards, strict=True)
        ]
        everyones = self.strategy.comm.all_gather_object(mine)
        self.responses = sorted(chain.from_iterable(everyones), key=lambda row: (row["position"], row["sample"]))

    def _result(self, metrics: dict[str, float]) -> dict[str, object]:
        config = self.config
        return {
            "model": config.model,
            "eval_data": config.eval_data or held_out_of(config.train_data),
            "num_prompts": len(self.prompts.evaluation),
            "samples_per_prompt": config.eval.n,
            "temperature": config.eval.temperature,
            "top_p": config.eval.top_p,
            "top_k": config.eval.top_k,
            "max_new_tokens": config.eval.max_new_tokens or config.max_new_tokens,
            "seed": config.seed,
            "metrics": metrics,
        }

    def close(self) -> None:
        """Ends the rewards' processes and the engine, and leaves the process group."""
        self.rewards.close()
        super().close()
