"""Converts scored groups to and from plain values and tensors, which a checkpoint loads without pickle."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from lightrl.records import Prompt, Sample, ScoredGroup, Status
from lightrl.rollout.observations import as_content, as_tensor


def group_state(group: ScoredGroup) -> dict[str, Any]:
    """Returns a group as plain values and tensors; the prompt is named by its index in the data set."""
    return {
        "step": group.step,
        "prompt": group.samples[0].prompt.index,
        "position": group.samples[0].position,
        "rewards": torch.tensor(group.rewards, dtype=torch.float64),
        "baseline": group.baseline,
        "prompt_ids": torch.tensor(group.samples[0].prompt_ids, dtype=torch.int64),
        "samples": [_sample_state(sample) for sample in group.samples],
    }


def _sample_state(sample: Sample) -> dict[str, Any]:
    return {
        "index": sample.sample_index,
        "ids": torch.tensor(sample.response_ids, dtype=torch.int64),
        "logprobs": torch.tensor(sample.sampler_logprobs, dtype=torch.float64),
        "versions": torch.tensor(sample.versions, dtype=torch.int64),
        "finish_reason": sample.finish_reason,
        "text": sample.text,
        "own": list(sample.own),
        "routing": None if sample.routing is None else torch.from_numpy(sample.routing),
        "allowed": None if sample.allowed is None else torch.from_numpy(sample.allowed),
        "images": [as_tensor(image) for image in sample.images],
        "turns": list(sample.turns),
        "reward": sample.reward,
        "turn_rewards": list(sample.turn_rewards),
        "numbers": dict(sample.numbers),
        "status": sample.status.value,
        "is_scored": sample.is_scored,
        "components": {label: list(pair) for label, pair in sample.components.items()},
        "judged": sample.judged,
        "ticket": sample.ticket,
        "start_version": sample.start_version,
        "prompt_ids": torch.tensor(sample.prompt_ids, dtype=torch.int64),
        "branches": [_sample_state(branch) for branch in sample.branches],
    }


def group_from_state(state: Mapping[str, Any], prompts: Sequence[Prompt]) -> ScoredGroup:
    """Returns the group that group_state() saved; prompts is the whole data set, in its order."""
    return ScoredGroup(
        step=state["step"],
        rewards=tuple(state["rewards"].tolist()),
        baseline=state["baseline"],
        samples=tuple(_sample_from(item, state, prompts[state["prompt"]]) for item in state["samples"]),
    )


def _sample_from(item: Mapping[str, Any], group: Mapping[str, Any], prompt: Prompt) -> Sample:
    return Sample(
        prompt=prompt,
        position=group["position"],
        sample_index=item["index"],
        response_ids=tuple(item["ids"].tolist()),
        sampler_logprobs=tuple(item["logprobs"].tolist()),
        versions=tuple(item["versions"].tolist()),
        finish_reason=item["finish_reason"],
        text=item["text"],
        own=tuple(item.get("own", ())),  # this and the following fields are missing in checkpoints of older versions
        images=tuple(map(as_content, item.get("images", ()))),
        turns=tuple(item.get("turns", (0,))),
        reward=item.get("reward"),
        turn_rewards=tuple(item.get("turn_rewards", ())),
        numbers=item.get("numbers", {}),
        status=Status(item.get("status", "completed")),
        is_scored=item.get("is_scored", False),
        components={label: tuple(pair) for label, pair in item.get("components", {}).items()},
        judged=item.get("judged"),
        ticket=item.get("ticket", -1),
        start_version=item.get("start_version", -1),
        prompt_ids=tuple(item.get("prompt_ids", group["prompt_ids"]).tolist()),
        branches=tuple(_sample_from(branch, group, prompt) for branch in item.get("branches", ())),
        routing=None if item.get("routing") is None else item["routing"].numpy(),
        allowed=None if item.get("allowed") is None else item["allowed"].numpy(),
    )
