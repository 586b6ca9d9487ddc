import math
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close

from lightrl.config import GRPOConfig, OptimConfig, PPOConfig, SFTConfig
from lightrl.strategy import create_strategy
from lightrl.strategy.optim.optimizers import build_lr_scheduler, lr_factor


def factors(count: int, **settings: object) -> list[float]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = build_lr_scheduler(optimizer, OptimConfig(**settings), total_steps=10)  # type: ignore[arg-type]
    found = []
    for _ in range(count):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return found


def check(found: list[float], wanted: list[float]) -> None:
    assert_close(torch.tensor(found), torch.tensor(wanted), atol=1e-6, rtol=0)


def test_constant() -> None:
    check(factors(12), [1.0] * 12)


def test_linear_with_warm_up() -> None:
    # 2 of warm-up: 1/2, 2/2; then 1 - k/8 for k = 0 .. 7, then the end
    check(factors(12, schedule="linear", warmup_steps=2), [0.5, 1.0, *[1 - k / 8 for k in range(9)], 0.0])


def test_cosine_to_a_minimum_with_warm_up_by_ratio() -> None:
    # 20 % of 10 = 2 of warm-up; then 0.1 + 0.9 x (1 + cos(pi k / 8)) / 2
    shape = [0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * k / 8)) for k in range(9)]
    check(factors(12, schedule="cosine", warmup_ratio=0.2, min_lr_ratio=0.1), [0.5, 1.0, *shape, 0.1])


@pytest.mark.parametrize("kind", ["linear", "cosine"])
def test_all_warm_up_never_divides_by_zero(kind: str) -> None:
    assert lr_factor(10, kind=kind, warmup_steps=10, total_steps=10, min_ratio=0.0) == 1.0


def test_linear_to_an_absolute_minimum() -> None:
    # from 1 to 0.2 in 10: 1 - 0.08 k
    check(factors(12, schedule="linear", min_lr=0.2), [*[1 - 0.08 * k for k in range(11)], 0.2])


def test_constant_after_a_warm_up_by_ratio() -> None:
    check(factors(6, warmup_ratio=0.4), [0.25, 0.5, 0.75, 1.0, 1.0, 1.0])  # 40 % of 10 = 4 of warm-up


def test_a_warm_up_by_ratio_is_not_cut_short_by_rounding() -> None:
    # 57 % of 100 are 57 steps, though 0.57 * 100 is 56.99999999999999: the first rate is 1/57, the 57th is the peak
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = build_lr_scheduler(optimizer, OptimConfig(warmup_ratio=0.57), total_steps=100)
    check([scheduler.get_last_lr()[0], scheduler.lr_lambdas[0](55)], [1 / 57, 56 / 57])


def test_the_same_thing_said_twice_is_refused() -> None:
    with pytest.raises(ValueError, match=r"--optim.min_lr 1e-05 and --optim.min_lr_ratio 0.1 say the same"):
        GRPOConfig(optim=OptimConfig(min_lr=1e-5, min_lr_ratio=0.1))
    with pytest.raises(ValueError, match=r"--optim.warmup_steps 3 and --optim.warmup_ratio 0.1 say the same"):
        GRPOConfig(optim=OptimConfig(warmup_steps=3, warmup_ratio=0.1))
    with pytest.raises(ValueError, match=r"--optim.min_lr 0.1 is above --lr 0.0001"):
        GRPOConfig(optim=OptimConfig(schedule="linear", min_lr=0.1))
    with pytest.raises(ValueError, match=r"--optim.min_lr 5e-05 is above --critic_lr 1e-05"):
        PPOConfig(critic_lr=1e-5, optim=OptimConfig(schedule="linear", min_lr=5e-5))


def test_what_would_do_nothing_is_refused() -> None:
    for optim in (OptimConfig(min_lr=1e-5), OptimConfig(min_lr_ratio=0.1)):
        with pytest.raises(ValueError, match=r"--optim\.min_lr_ratio need --optim\.schedule linear or cosine"):
            SFTConfig(optim=optim)
    with pytest.raises(ValueError, match=r"--optim\.momentum needs --optim\.name muon"):
        SFTConfig(optim=OptimConfig(momentum=0.5))


def rates_of(unit: str, folder: Path | None = None, *, first: int = 0, steps: int = 4) -> list[float]:
    """Of two updates in each step of a run of 4; linear from 1 after a warm-up of 2, resumed from the folder."""
    optim = OptimConfig(schedule="linear", schedule_unit=unit, warmup_steps=2)  # type: ignore[arg-type]
    config = GRPOConfig(lr=1.0, max_steps=4, num_minibatches=2, optim=optim)
    strategy = create_strategy(config)
    model = torch.nn.Linear(1, 1)
    (model, _, _), *_ = strategy.prepare_models_and_optimizers(
        model, None, None, None, strategy.args, config.schedule_length
    )
    if first and folder is not None:
        strategy.load_ckpt(model, str(folder), load_lr_scheduler_states=True)
    found = []
    for _ in range(first, steps):
        for _ in range(2):
            found.append(strategy.train_batch([torch.ones(1, 1)], lambda out, mb: out.sum(), len).lr)
        if unit == "rl_step":
            strategy.trained.step_schedules()
    if folder is not None:
        strategy.save_ckpt(model, str(folder))
    return found


@pytest.mark.parametrize(
    ("unit", "wanted"),
    [
        # 8 updates: 1/2, 2/2 of warm-up, then 1 - k/6 for k = 0 .. 5
        ("optimizer_step", [0.5, 1.0, 1.0, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6]),
        # 4 steps: 1/2, 2/2, then 1 - 0/2, 1 - 1/2
        ("rl_step", [0.5, 0.5, 1.0, 1.0, 1.0, 1.0, 0.5, 0.5]),
    ],
)
def test_the_unit_of_the_schedule_and_a_resume_in_its_middle(unit: str, wanted: list[float], tmp_path: Path) -> None:
    check(rates_of(unit), wanted)
    before = rates_of(unit, tmp_path, steps=1)
    check(before + rates_of(unit, tmp_path, first=1), wanted)


def test_a_groups_own_rate_keeps_its_share_to_the_end() -> None:
    groups = [{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": lr, "lr_scale": lr / 2} for lr in (0.2, 2.0)]
    optimizer = torch.optim.SGD(groups)
    scheduler = build_lr_scheduler(optimizer, OptimConfig(schedule="linear", min_lr=0.5), total_steps=4)
    found = []
    for _ in range(5):
        found.append([group["lr"] for group in optimizer.param_groups])
        optimizer.step()
        scheduler.step()
    # from 2 to 0.5 in 4, and a tenth of that for the first group, which has no rate of the run itself
    assert_close(torch.tensor(found)[:, 1], torch.tensor([2.0, 1.625, 1.25, 0.875, 0.5]), atol=1e-6, rtol=0)
    assert_close(torch.tensor(found)[:, 0] * 10, torch.tensor(found)[:, 1], atol=1e-6, rtol=0)
