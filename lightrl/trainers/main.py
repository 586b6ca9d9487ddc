"""From a config to a finished run and an exit code: 0 done, 2 the user can mend it, 1 anything else."""

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
    """Trains and cleans up; ends the process with the exit code if anything fails."""
    if not torch.cuda.is_available():
        # transformers imports deepspeed where it is installed, which warns on stdout of a choice that is plain here.
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
        sys.stderr.write("interrupted; the same command with this --output_dir goes on from the newest checkpoint\n")
        _exit(130)
    except Exception:
        traceback.print_exc()
        _exit(1)


def _build(trainer_class: Callable[[Any], Trainer], config: RunConfig) -> Trainer:
    """What is wrong with the options, the data or the folder shows here, before anything is trained or written."""
    try:
        return trainer_class(config)
    except (ValueError, OSError, ImportError, SyntaxError) as error:
        print_user_error(error)
        _exit(2)


def _exit(code: int) -> NoReturn:
    """At once: tearing a broken process group down can wait for a peer that is gone."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
