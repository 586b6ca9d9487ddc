"""An exact run is built by run_trainer, and by nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightrl.config import GRPOConfig
from lightrl.trainers.grpo import GRPOTrainer


def test_a_trainer_by_itself_refuses_the_option_it_would_not_hear(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="takes no part in --exact"):
        GRPOTrainer(GRPOConfig(exact=True, output_dir=str(tmp_path)))
