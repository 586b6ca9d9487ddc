"""The native engine without CUDA graphs (--native.cuda_graphs False)."""

from __future__ import annotations

from lightrl.engines.native.engine import NativeEngine
from lightrl.engines.native.forward import ModelRunner


class EagerRunner(ModelRunner):
    """Launches every operation of a decode step, so that a debugger can stop in it."""

    replays_steps = False


class EagerEngine(NativeEngine):
    """Engine that launches every operation of every step."""

    make_runner = EagerRunner
