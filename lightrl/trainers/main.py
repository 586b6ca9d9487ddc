"""Turns a config into a finished run and an exit code: 0 done, 2 an error the user can correct, 1 any other error."""

from __future__ import annotations

import logging
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

import torch

from lightrl.comm import RankError
from lightrl.config import RunConfig, print_user_error
from lightrl.trainers.fit import Trainer


def run_trainer(trainer_class: Callable[[Any], Trainer], config: RunConfig) -> None:
    """Trains and cleans up; a failure ends the process with the exit code."""
    if not torch.cuda.is_available():
        # transformers imports deepspeed where it is installed, which then warns on stdout that it chose the CPU.
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    logging.basicConfig(level=logging.WARNING, format=f"[rank {os.environ.get('RANK', '0')}] %(message)s")
    try:
        trainer = _build(trainer_class, config)
        trainer.fit()
        trainer.close()
    except RankError as error:
        sys.stderr.write(f"[rank {os.environ.get('RANK', '0')}] {error}\n")
        _exit(1)
    except KeyboardInterrupt:
        sys.stderr.write("interrupted; the same command with this --output_dir continues from the newest checkpoint\n")
        _exit(130)
    except Exception:
        traceback.print_exc()
        _exit(1)


def _build(trainer_class: Callable[[Any], Trainer], config: RunConfig) -> Trainer:
    """Builds the trainer; mistakes in the options, the data or the folder show here, before training."""
    try:
        return trainer_class(config)
    except (ValueError, OSError, ImportError, SyntaxError) as error:
        print_user_error(error)
        _exit(2)


def _exit(code: int) -> NoReturn:
    """Ends the process at once: tearing down a broken process group can wait for a rank that is gone."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
