"""Evaluates any model that can be trained: samples held-out prompts, scores them, and writes one JSON object."""

from __future__ import annotations

import json
import sys
from typing import NoReturn

from lightrl.config import EvaluateConfig
from lightrl.rewards import AnyReward
from lightrl.rewards.reward_set import RewardSet
from lightrl.strategy import StrategyBase
from lightrl.trainers.fit import Trainer
from lightrl.trainers.policy_step import PromptData, evaluate, start_engine
from lightrl.trainers.run import RunContext, load_start_policy


class Evaluator(Trainer):
    """Samples and scores the prompts of --eval_data once, by the code that evaluates in a training."""

    kind = "evaluate"
    config: EvaluateConfig

    def __init__(
        self, run: RunContext | EvaluateConfig, *, strategy: StrategyBase | None = None, reward: AnyReward | None = None
    ) -> None:
        config: EvaluateConfig = run.config if isinstance(run, RunContext) else run
        self.rewards = RewardSet.from_config(config, reward)
        super().__init__(run, strategy=strategy)
        self.prompts = PromptData(self.run)
        with self.strategy.comm.phase("loading the model", local=True):
            policy = load_start_policy(self.run, is_reference=True)
        self.model = self.strategy.prepare_frozen(policy)
        self.collector = start_engine(self.run, self.model, self.rewards)

    def step(self) -> NoReturn:
        """Raises TypeError: an evaluation takes no step."""
        raise TypeError("An evaluation has no steps: call evaluate() or fit().")

    def evaluate(self) -> dict[str, float]:
        """Returns the metrics over all ranks."""
        return evaluate(self.collector, self.prompts, self.config.eval)

    def fit(self) -> dict[str, float]:
        """Evaluates, prints the result, and writes it to evaluation.json in the folder of the run."""
        metrics = self.evaluate()
        if self.strategy.comm.is_main:
            text = json.dumps(self._result(metrics), indent=2)
            self.folder.root.mkdir(parents=True, exist_ok=True)
            (self.folder.root / "evaluation.json").write_text(f"{text}\n")
            sys.stdout.write(f"{text}\n")
        return metrics

    def _result(self, metrics: dict[str, float]) -> dict[str, object]:
        config = self.config
        return {
            "model": config.model,
            "eval_data": config.eval_data or config.train_data,
            "num_prompts": len(self.prompts.evaluation),
            "samples_per_prompt": config.eval.n,
            "temperature": config.eval.temperature,
            "seed": config.seed,
            "metrics": metrics,
        }

    def close(self) -> None:
        """Ends the rewards' processes and the engine, and leaves the process group."""
        self.rewards.close()
        super().close()
