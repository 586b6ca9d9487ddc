"""An exact run is built by run_trainer, and by nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lightrl.algorithms.advantages import ScoredSamples
from lightrl.algorithms.registry import advantage
from lightrl.config import AlgorithmConfig, GRPOConfig
from lightrl.exact.run import check_functions
from lightrl.trainers.grpo import GRPOTrainer
from lightrl.trainers.objective import PolicyObjective


@advantage(whiten=True)
def whitened(samples: ScoredSamples) -> torch.Tensor:
    return samples.scores


def plain(samples: ScoredSamples) -> torch.Tensor:
    return samples.scores


def test_functions_that_ask_for_sums_of_each_rank_are_refused() -> None:
    own = AlgorithmConfig(advantage=f"{__name__}:plain")
    check_functions(own, PolicyObjective(own, group_size=2))
    check_functions(own, None)  # of PPO, whose advantages are exact
    own = AlgorithmConfig(advantage=f"{__name__}:whitened")
    with pytest.raises(ValueError, match=r"--exact True does not go with --algorithm.advantage .*:whitened, which"):
        check_functions(own, PolicyObjective(own, group_size=2))
    chooses = AlgorithmConfig(loss="kl_cov")
    with pytest.raises(ValueError, match=r"--exact True does not go with --algorithm.loss kl_cov, which"):
        check_functions(chooses, PolicyObjective(chooses, group_size=2, has_selector=True))


def test_a_trainer_by_itself_refuses_the_option_it_would_not_hear(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="takes no part in --exact"):
        GRPOTrainer(GRPOConfig(exact=True, output_dir=str(tmp_path)))
