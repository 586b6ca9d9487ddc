"""strategy.stats: weighted by hand, over two ranks that record other names, and in the metrics of a run."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from lightrl.config import EvalConfig, GRPOConfig, RolloutLogConfig
from lightrl.config.strategy import CheckpointConfig
from lightrl.strategy import create_strategy
from lightrl.testing import run_spmd
from lightrl.trainers.grpo import GRPOTrainer

PROGRAM = """
import json

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from lightrl.config import GRPOConfig
from lightrl.strategy import create_strategy

strategy = create_strategy(GRPOConfig(strategy="ddp"))
strategy.setup_distributed()
rank = strategy.comm.rank
with strategy.stats.scope("reward"):
    strategy.stats.record("length", [[2.0, 4.0], [9.0]][rank])
    if rank == 1:
        strategy.stats.record("rare", 3.0)
    strategy.stats.record("none", [])
strategy.stats.add("calls", 1 + rank)
exported = strategy.stats.export()
if rank == 0:
    print(f"EXPORT {json.dumps(exported)}")
assert strategy.stats.export() == {}
sharded = distribute_tensor(torch.arange(4.0), init_device_mesh("cpu", (2,)), [Shard(0)])  # float() would be a part's
for record in (strategy.stats.record, strategy.stats.add, lambda name, value: strategy.stats.record(name, [value])):
    try:
        record("norm", sharded.norm())
    except ValueError as error:
        assert "a DTensor of shape (), of which this rank holds a part. Record its full_tensor()" in str(error)
    else:
        raise AssertionError("a DTensor was recorded")
strategy.stats.record("norm", sharded.norm().full_tensor())
assert abs(strategy.stats.export()["norm/mean"] - 14**0.5) < 1e-6


class Recorded(torch.nn.Linear):
    def loss(self, output, batch):
        strategy.stats.record("seen", float(batch[0, 0]))
        return output.mean()


model = Recorded(1, 1)
model, optimizer, _ = strategy.prepare((model, strategy.create_optimizer(model), None))
batches = [torch.full((1, 1), value) for value in [[1.0, 2.0, 3.0], [8.0]][rank]]  # rank 1 repeats its own twice
result = strategy.train_batch(batches, strategy.unwrap_model(model).loss, len, model=model)
assert (result.total_weight, result.num_micro_batches) == (4, 3)
assert strategy.stats.export()["seen/mean"] == 3.5  # (1 + 2 + 3 + 8) / 4
strategy.close()
"""


def test_scopes_masks_and_times() -> None:
    stats = create_strategy(GRPOConfig(strategy="single")).stats
    values, mask = torch.tensor([[1.0, 8.0], [3.0, 2.0]]), torch.tensor([[True, False], [True, True]])
    with stats.scope("actor"), stats.scope("ratio"):
        stats.record("kept", values, mask)  # 1, 3 and 2
    stats.record("all", values)
    with stats.scope("actor"), stats.time("seconds"):
        pass
    numbers = stats.export()
    seconds = [numbers.pop(f"actor/seconds/{kind}") for kind in ("min", "mean", "max")]
    assert seconds[0] == seconds[1] == seconds[2] < 1
    assert numbers == {
        **{"actor/ratio/kept/mean": 2.0, "actor/ratio/kept/min": 1.0, "actor/ratio/kept/max": 3.0},
        **{"all/mean": 3.5, "all/min": 1.0, "all/max": 8.0},
    }
    with pytest.raises(ValueError, match="a mask beside a list: give both as tensors"):
        stats.record("list", [1.0], torch.tensor([True]))


def test_ranks_may_record_other_names_and_numbers_of_values(tmp_path: Path) -> None:
    program = tmp_path / "stats.py"
    program.write_text(PROGRAM)
    said = run_spmd(program, world_size=2, timeout_s=100)
    (found,) = (json.loads(line.partition("EXPORT ")[2]) for line in said.splitlines() if "EXPORT " in line)
    assert found == {  # (2 + 4 + 9) / 3, not the mean of 3 and 9
        **{"reward/length/mean": 5.0, "reward/length/min": 2.0, "reward/length/max": 9.0},
        **{"reward/rare/mean": 3.0, "reward/rare/min": 3.0, "reward/rare/max": 3.0},
        "reward/none/mean": 0.0,
        "calls": 3.0,
    }


def test_what_was_recorded_before_the_trainer_was_made_is_kept(tmp_path: Path) -> None:
    config = GRPOConfig(strategy="single", output_dir=str(tmp_path))
    strategy = create_strategy(config)
    strategy.stats.add("early", 2)
    trainer = GRPOTrainer(config, strategy=strategy)
    strategy.stats.add("early", 3)
    assert trainer.statistics.reduce(strategy.comm) == {"early": 5.0}
    trainer.close()


class Recording(GRPOTrainer):
    made_by = None

    def learn_from(self, groups: Any) -> Any:
        with self.strategy.stats.scope("mine"):
            self.strategy.stats.record("groups", [float(len(group.samples)) for group in groups])
        return super().learn_from(groups)


def test_a_trainer_logs_them_with_its_own(tmp_path: Path) -> None:
    config = GRPOConfig(
        **{"num_prompts": 2, "group_size": 3, "max_steps": 2, "strategy": "single", "output_dir": str(tmp_path)},
        eval=EvalConfig(every=0),
        log=RolloutLogConfig(tensorboard=False),
        checkpoint=CheckpointConfig(every=0),
    )
    trainer = Recording(config)
    trainer.fit()
    trainer.close()
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(row["mine/groups/mean"], row["mine/groups/min"]) for row in rows] == [(3.0, 3.0)] * 2
