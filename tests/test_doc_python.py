"""Runs every Python block of the pages. What a page speaks of around its blocks, such as a strategy, is given."""

from __future__ import annotations

import ast
import asyncio
import inspect
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from test_doc_blocks import PAGES, blocks
from transformers import AutoModelForSequenceClassification

import lightrl
from examples import rollouts
from lightrl import GRPOConfig, create_strategy
from lightrl.builtin.model import builtin_model_path
from lightrl.config import EvalConfig, PPOConfig, RolloutConfig, parse_config
from lightrl.engines.base import EngineGroup, SamplingParams
from lightrl.engines.native.engine import build_native_engine
from lightrl.models.policy import load_policy, load_tokenizer
from lightrl.rollout.rollouts import Rollouts
from lightrl.strategy.torch_native import TorchStrategy
from lightrl.trainers.fit import StepReport, Trainer
from lightrl.trainers.policy_step import sync_engine
from lightrl.trainers.ppo import PPOTrainer
from lightrl.trainers.run import RunContext

Names = dict[str, Any]


def prepared(*, serves: bool = True) -> Names:
    """A strategy with the built-in model."""
    path, config = str(builtin_model_path()), GRPOConfig(strategy="single")
    strategy = create_strategy(config)
    strategy.setup_distributed()
    strategy.tokenizer = load_tokenizer(path)
    policy = load_policy(path, materialize=True)
    if serves:
        policy = strategy.prepare_trained(policy).model
        strategy.setup_inference_engine(config, "native", actor=policy)
    return {"strategy": strategy, "policy": policy, "torch": torch}


def of_engines(_: Path) -> Names:
    given = prepared()
    pairs = [(name, tensor.clone()) for name, tensor in given["strategy"].full_parameters(given["policy"])]
    params = SamplingParams(max_new_tokens=256, seed=1)
    return given | {"SamplingParams": SamplingParams, "params": params, "prompt": [3, 4, 5], "pairs": pairs}


def of_adapters(_: Path) -> Names:
    return prepared(serves=False) | {
        "classifier": AutoModelForSequenceClassification.from_pretrained(str(builtin_model_path()), num_labels=1)
    }


def of_rollouts(_: Path) -> Names:
    openai = pytest.importorskip("openai")
    lines = [{"prompt": f"{left}+7=", "answer": str(left + 7)} for left in range(10, 42)]
    own = {name: getattr(rollouts, name) for name in ("Add", "ScoredSamples", "grpo", "loss")}
    others = {"Prompt": lightrl.Prompt, "Rollouts": Rollouts, "AsyncOpenAI": openai.AsyncOpenAI}
    return prepared() | own | others | {"records": lines, "num_steps": 1}


def of_a_trainer(folder: Path) -> Names:
    config = PPOConfig(
        strategy="single",
        output_dir=str(folder / "run"),
        num_prompts=4,
        eval=EvalConfig(every=0),
        lr=1e-4,
    )
    own = {"Trainer": Trainer, "RunContext": RunContext, "RolloutConfig": RolloutConfig, "StepReport": StepReport}
    calls = {"parse_config": parse_config, "run_trainer": None, "sync_engine": sync_engine}
    loop = {"create_strategy": create_strategy, "config": config, "model": torch.nn.Linear(1, 1), "num_updates": 1}
    loop |= {"micro_batches": [torch.ones(1, 1)] * 2, "count": 1, "total": 2, "loss": lambda model, x: model(x).sum()}
    return own | calls | loop | {"trainer": PPOTrainer(config), "num_prompts": 4}


def of_an_engine(_: Path) -> Names:
    given = prepared(serves=False)
    strategy = given["strategy"]
    parts = {"tokenizer": strategy.tokenizer, "options": GRPOConfig(), "device": strategy.device}
    return {"MyEngine": build_native_engine, "model": given["policy"].hf, "group": EngineGroup(), **parts}


def of_batches(_: Path) -> Names:
    data = {
        "input_ids": torch.tensor([[3, 4, 5, 6], [7, 8, 9, 0]]),
        "attention_mask": torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0]]),
        "loss_mask": torch.tensor([[0, 0, 1, 1], [0, 1, 1, 0]]),
        "rewards": torch.tensor([1.0, 0.5]),
        "old_logprobs": torch.zeros(2, 4),
        "features": torch.zeros(2, 3),
    }
    return prepared() | {"data": data}


def of_answers(folder: Path) -> Names:
    """Two prompts: one whose answers differ, one whose answers are alike but for one without a reward."""
    rewards = [(0, "a", 0.5), (0, "b", 0.0), (0, "c", 1.0), (1, "d", 1.0), (1, "e", 1.0), (1, "f", None)]
    rows = [{"position": place, "prompt": f"{place}?", "response": text, "reward": r} for place, text, r in rewards]
    (folder / "runs/answers").mkdir(parents=True)
    (folder / "runs/answers/responses.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return {}


def pairs_of(folder: Path) -> None:
    assert (folder / "pairs.jsonl").read_text() == '{"prompt": "0?", "chosen": "c", "rejected": "b"}\n'


class Searcher:
    """Stands for the workflow whose method a block shows."""

    async def search(self, query: str) -> str:
        return query


GIVEN: dict[str, Callable[[Path], Names]] = {
    "README": lambda _: {"torch": torch, "TorchStrategy": TorchStrategy},
    "adding_a_reward": lambda _: {"Sample": lightrl.Sample},
    "adding_a_trainer": of_a_trainer,
    "adding_an_engine": of_an_engine,
    "engines": of_engines,
    "lora": of_adapters,
    "offline": of_answers,
    "metrics": lambda _: prepared() | {"ratios": torch.ones(3), "mask": torch.tensor([True, False, True])},
    "rollouts": of_rollouts,
    "schedules": lambda _: {"self": Searcher(), "query": "sums"},
    "user_batches": of_batches,
}
RESULTS: dict[str, Callable[[Path], None]] = {"offline": pairs_of}
WITH_PYTHON = [page for page in PAGES if any(True for _ in blocks(page, "python", "py"))]


def run(code: str, names: Names) -> None:
    """Runs a block, which may await as in a notebook."""
    compiled = compile(code, "block", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
    running = eval(compiled, names)
    if inspect.iscoroutine(running):
        asyncio.run(running)


@pytest.mark.parametrize("page", WITH_PYTHON, ids=lambda page: page.stem)
def test_the_blocks_of_a_page_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "a_page", **GIVEN.get(page.stem, lambda _: {})(tmp_path)}
    try:
        for code in blocks(page, "python", "py"):
            run(code, names)
        RESULTS.get(page.stem, lambda _: None)(tmp_path)
    finally:
        for name in ("trainer", "rollouts", "strategy"):
            getattr(names.get(name), "close", partial(int, 0))()


def test_a_wrong_block_is_found() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        run("import asyncio\nawait asyncio.sleep(0)\nasyncio.nothing()", {})
