"""Stores scored groups in files: a line of JSON for each group, and the numbers of all tokens in safetensors.

Each rank writes files of its own, DIR/step-000001/rank-0-of-2.jsonl and .safetensors. In a run with the same number of
ranks each one reads its own files again; any other run deals out the groups in the order of their positions.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from lightrl.checkpoint import save_bytes, save_tensors
from lightrl.data.sampler import shard
from lightrl.records import Prompt, Sample, ScoredGroup, Status
from lightrl.rollout.observations import as_content, as_tensor

_PER_TOKEN = {  # the fields of a sample with one value per response token
    "response_ids": torch.int64,
    "sampler_logprobs": torch.float64,
    "versions": torch.int64,
    "own": torch.bool,
}


def step_folder(record: Path, step: int) -> Path:
    """Returns the folder of a step. `step` counts from 0, but the folder's name from 1, as metrics.jsonl does."""
    return record / f"step-{step + 1:06d}"


def write_groups(record: Path, step: int, groups: Sequence[ScoredGroup], *, rank: int, world: int) -> None:
    """Writes this rank's groups of a step, in place of those that a run on other ranks wrote before it was resumed."""
    folder = step_folder(record, step)
    folder.mkdir(parents=True, exist_ok=True)
    for path in (*folder.glob("rank-*-of-*.jsonl"), *folder.glob("rank-*-of-*.safetensors")):
        if _world_of(path) != world:
            path.unlink(missing_ok=True)  # every rank does this
    tensors: dict[str, Tensor] = {}
    lines = [json.dumps(_group_row(group, tensors)) for group in groups]
    stem = folder / f"rank-{rank}-of-{world}"
    stem.with_suffix(".jsonl").unlink(missing_ok=True)  # written last: without it the step is incomplete
    save_tensors(stem.with_suffix(".safetensors"), tensors)
    save_bytes(stem.with_suffix(".jsonl"), "".join(f"{line}\n" for line in lines).encode())


def read_groups(record: Path, step: int, prompts: Sequence[Prompt], *, rank: int, world: int) -> list[ScoredGroup]:
    """Returns the groups of a step that this rank learns from; prompts: the whole data set, in its order."""
    folder = step_folder(record, step)
    paths = sorted(folder.glob("rank-*-of-*.jsonl"), key=_rank_of)
    worlds = {_world_of(path) for path in paths}
    if len(worlds) != 1 or len(paths) != next(iter(worlds)):
        raise _incomplete(folder, paths)
    if world == len(paths):
        return list(_groups_of(paths[rank], prompts))
    everything = [group for path in paths for group in _groups_of(path, prompts)]
    return shard(sorted(everything, key=lambda group: group.samples[0].position), rank, world)


def num_steps(record: Path) -> int:
    """Returns the number of consecutive steps, from the first on, that a record holds."""
    count = 0
    while step_folder(record, count).is_dir():
        count += 1
    return count


def _rank_of(path: Path) -> int:
    return int(path.stem.split("-")[1])


def _world_of(path: Path) -> int:
    return int(path.stem.split("-")[3])


def _group_row(group: ScoredGroup, tensors: dict[str, Tensor]) -> dict[str, Any]:
    prompt = group.samples[0].prompt
    return {
        "step": group.step,
        "prompt": prompt.index,
        "token_ids": prompt.token_ids,
        "position": group.samples[0].position,
        "rewards": [None if math.isnan(reward) else reward for reward in group.rewards],
        "baseline": None if group.baseline is None or math.isnan(group.baseline) else group.baseline,
        "has_failed_baseline": group.baseline is not None and math.isnan(group.baseline),
        "samples": [_sample_row(sample, tensors) for sample in group.samples],
    }


def _sample_row(sample: Sample, tensors: dict[str, Tensor]) -> dict[str, Any]:
    name = str(len(tensors))  # unique, because every sample adds tensors
    for field, dtype in _PER_TOKEN.items():
        tensors[f"{name}.{field}"] = torch.tensor(getattr(sample, field), dtype=dtype)
    for number, image in enumerate(sample.images):
        tensors[f"{name}.image.{number}"] = as_tensor(image)
    if sample.routing is not None:
        tensors[f"{name}.routing"] = torch.from_numpy(sample.routing).contiguous()
    if sample.allowed is not None:
        tensors[f"{name}.allowed"] = torch.from_numpy(sample.allowed).contiguous()
    return {
        "tensors": name,
        "sample_index": sample.sample_index,
        "prompt_ids": sample.prompt_ids,
        "finish_reason": sample.finish_reason,
        "text": sample.text,
        "num_images": len(sample.images),
        "turns": sample.turns,
        "reward": sample.reward,
        "turn_rewards": sample.turn_rewards,
        "numbers": dict(sample.numbers),
        "status": sample.status.value,
        "ticket": sample.ticket,
        "start_version": sample.start_version,
        "is_scored": sample.is_scored,
        "components": {
            label: [w, None if math.isnan(value) else value] for label, (w, value) in sample.components.items()
        },
        "branches": [_sample_row(branch, tensors) for branch in sample.branches],
    }


def _groups_of(path: Path, prompts: Sequence[Prompt]) -> Iterator[ScoredGroup]:
    tensors = load_file(path.with_suffix(".safetensors"))
    for line in path.read_text().splitlines():
        row = json.loads(line)
        index = row["prompt"]
        if index >= len(prompts) or list(prompts[index].token_ids) != row["token_ids"]:
            raise ValueError(
                f"{path} was recorded of other prompts: line {index + 1} of the data is another one, or has other "
                "tokens. Give the --train_data and --model of the record."
            )
        yield ScoredGroup(
            samples=tuple(_sample(item, row["position"], prompts[index], tensors) for item in row["samples"]),
            rewards=tuple(math.nan if reward is None else reward for reward in row["rewards"]),
            step=row["step"],
            baseline=math.nan if row["has_failed_baseline"] else row["baseline"],
        )


def _sample(row: Mapping[str, Any], position: int, prompt: Prompt, tensors: Mapping[str, Tensor]) -> Sample:
    name = row["tensors"]
    per_token: dict[str, Any] = {field: tuple(tensors[f"{name}.{field}"].tolist()) for field in _PER_TOKEN}
    routing, allowed = tensors.get(f"{name}.routing"), tensors.get(f"{name}.allowed")
    return Sample(
        prompt=prompt,
        position=position,
        sample_index=row["sample_index"],
        finish_reason=row["finish_reason"],
        text=row["text"],
        prompt_ids=tuple(row["prompt_ids"]),
        routing=None if routing is None else routing.numpy(),
        allowed=None if allowed is None else allowed.numpy(),
        images=tuple(as_content(tensors[f"{name}.image.{number}"]) for number in range(row.get("num_images", 0))),
        turns=tuple(row["turns"]),
        reward=row["reward"],
        turn_rewards=tuple(row.get("turn_rewards", ())),  # missing in records of older versions
        numbers=row["numbers"],
        status=Status(row["status"]),
        ticket=row["ticket"],
        start_version=row["start_version"],
        is_scored=row["is_scored"],
        components={
            label: (weight, math.nan if value is None else value)
            for label, (weight, value) in row.get("components", {}).items()
        },
        branches=tuple(_sample(branch, position, prompt, tensors) for branch in row["branches"]),
        **per_token,
    )


def _incomplete(folder: Path, paths: Sequence[Path]) -> ValueError:
    found = ", ".join(path.name for path in paths) or "no file"
    return ValueError(
        f"{folder} is no complete step of a record: it holds {found}, and there must be one of each rank of one run. "
        "Record it again."
    )
