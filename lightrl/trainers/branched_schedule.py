"""Learning-rate schedules of a run that continues a checkpoint with another number of updates per step.

Such a schedule goes on from the update that it has reached, and its length is that of the updates that were planned
before plus those that follow, so that it ends with the run.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from torch.optim.lr_scheduler import LambdaLR

from lightrl.config import RolloutConfig
from lightrl.config.command_line import flatten
from lightrl.config.options import as_dict
from lightrl.config.yaml_text import read_yaml
from lightrl.strategy.saving.saver import restore_lambdas
from lightrl.strategy.saving.state_reader import load_object

_EXTRA = "extra_updates"  # attribute and saved key: how many updates longer the schedule is than its options say


def end_schedules_with_run(trainer: Any, checkpoint: Path) -> None:
    """Corrects the lengths of a trainer's schedules after a checkpoint was loaded; every rank must call it."""
    config = trainer.config
    if not isinstance(config, RolloutConfig) or config.optim.schedule_unit == "rl_step":
        return
    comm, now = trainer.strategy.comm, dict(flatten(as_dict(config)))
    before = {**now, **comm.broadcast_object(_options_of(checkpoint) if comm.is_main else {})}
    for name, model in {"": trainer.model, **trainer.companions}.items():
        is_policy, state_file = not name, checkpoint / name / "state.pt"
        length = config.policy_schedule_length if is_policy else config.schedule_length
        for entry in trainer.strategy.trained.entries:
            if entry.model is model and _length_of(entry.scheduler) == length and state_file.is_file():
                done = [_num_planned(options, trainer.step_index, is_policy=is_policy) for options in (before, now)]
                extra = (load_object(state_file).get("scheduler") or {}).get(_EXTRA, 0) + done[0] - done[1]
                if extra:
                    _lengthen(entry.scheduler, extra, config.optim)


def _options_of(checkpoint: Path) -> Mapping[str, Any]:
    """Returns the options of the run that wrote the checkpoint; none if it is a copy of the checkpoint alone."""
    try:
        return dict(flatten(read_yaml(checkpoint.parent.parent / "config.yaml", "it")))
    except (OSError, ValueError, AttributeError):  # the last: it holds no options
        return {}


def _num_planned(options: Mapping[str, Any], num_steps: int, *, is_policy: bool) -> int:
    """Returns the number of updates, skipped ones included, that these options plan for so many steps."""
    frozen = int(options.get("critic.policy_frozen_steps", 0)) if is_policy else 0
    return max(0, num_steps - frozen) * int(options["num_epochs"]) * int(options["num_minibatches"])


def _length_of(scheduler: Any) -> int | None:
    """Returns the length of a schedule that the options name; None for any other."""
    factor = scheduler.lr_lambdas[0] if isinstance(scheduler, LambdaLR) else None
    length: int | None = factor.keywords.get("total_steps") if isinstance(factor, partial) else None
    return length


def _lengthen(scheduler: Any, extra: int, optim: Any) -> None:
    total = scheduler.lr_lambdas[0].keywords["total_steps"] + extra
    warmup = optim.warmup_steps or int(optim.warmup_ratio * total + 1e-9)
    scheduler.lr_lambdas = [partial(factor, total_steps=total, warmup_steps=warmup) for factor in scheduler.lr_lambdas]
    setattr(scheduler, _EXTRA, extra)  # which its state_dict() includes
    restore_lambdas(scheduler, scheduler.state_dict())
