"""The parts of an episode in samples.jsonl."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from made_samples import made_sample

from lightrl import GRPOConfig, GRPOTrainer
from lightrl.config import EvalConfig, WorkflowConfig
from lightrl.records import Experience, Prompt, Sample
from lightrl.trainers.transcript import Transcript

WORDS = {1: "6", 2: "<end>", 3: "no", 4: "<|image_pad|>", 5: "7"}


def turns_of(sample: Sample, **fields: Any) -> Any:
    tokenizer = SimpleNamespace(decode=lambda ids: "".join(WORDS[i] for i in ids))
    columns = Transcript(SimpleNamespace(run=SimpleNamespace(tokenizer=tokenizer))).sample_columns
    return columns(Experience(sample=sample, reward=1.0, advantage=0.0, **fields))["turns"]


def episode(ids: tuple[int, ...], own: tuple[bool, ...], **fields: Any) -> Sample:
    prompt = Prompt(index=0, text="p", token_ids=(1,))
    numbers = {"sampler_logprobs": (-1.0,) * len(ids), "versions": (0,) * len(ids)}
    return made_sample(prompt=prompt, response_ids=ids, text="", own=own, **numbers, **fields)


def test_a_part_is_trained_or_read_and_has_the_reward_of_its_turn() -> None:
    sample = episode((1, 2, 3, 4, 4, 5), (True, True, False, False, False, True), turns=(0, 5), turn_rewards=(0.5, 1.0))
    assert turns_of(sample) == [
        {"text": "6<end>", "is_own": True, "is_trained": True, "reward": 0.5},
        {"text": "no<|image_pad|>", "is_own": False, "is_trained": False},
        {"text": "7", "is_own": True, "is_trained": True, "reward": 1.0},
    ]


def test_what_an_episode_has_is_not_trained_if_it_is_left_out_of_the_loss_or_too_old() -> None:
    sample = episode((1, 3, 5, 5), (True, False, True, True), turns=(0, 2), turn_rewards=())
    assert [part["is_trained"] for part in turns_of(sample, is_trained=False)] == [False] * 3
    newer = dataclasses.replace(sample, versions=(0, 0, 0, 1))
    assert [(part["text"], part["is_trained"]) for part in turns_of(newer, min_version=1)] == [
        ("6", False),
        ("no", False),
        ("7", False),
        ("7", True),
    ]


def test_turns_that_follow_each_other_are_parts_and_a_missing_reward_is_left_out() -> None:
    sample = episode((1, 5), (), turns=(0, 1, 2), turn_rewards=(0.25,))  # the last turn said nothing
    assert turns_of(sample) == [
        {"text": "6", "is_own": True, "is_trained": True, "reward": 0.25},
        {"text": "7", "is_own": True, "is_trained": True},
    ]
    assert turns_of(episode((), (), turns=(0,))) == []


class Twice:
    """Asks for the answer a second time."""

    def reset(self, data: Prompt) -> str:
        self.turns = 0
        return ""

    def step(self, action: str) -> tuple[str, float, bool]:
        self.turns += 1
        return "+", 0.5, self.turns == 2


def test_a_run_with_a_workflow_logs_its_turns(tmp_path: Path) -> None:
    rollout = WorkflowConfig(workflow="environment", workflow_args=(f"environment={__name__}:Twice",), max_turns=2)
    config = GRPOConfig(
        strategy="single",
        output_dir=str(tmp_path / "run"),
        rollout=rollout,
        reward=("episode",),
        max_steps=1,
        num_prompts=1,
        group_size=2,
        eval=EvalConfig(every=0),
    )
    GRPOTrainer(config).fit()
    row = json.loads((tmp_path / "run/samples.jsonl").read_text().splitlines()[0])
    said = [part for part in row["turns"] if part["is_trained"]]
    assert [part["reward"] for part in said] == [0.5, 0.5]
    assert len(row["turns"]) == 3
    assert row["turns"][1] == {"text": "+", "is_own": False, "is_trained": False}
