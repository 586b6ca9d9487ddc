"""The engine of a run with `--exact` and --top_p or --top_k."""

from __future__ import annotations

from functools import partial

from lightrl.engines.native.engine import build_native_engine
from lightrl.engines.native.truncated import TruncatedEngine
from lightrl.exact.engine import ExactEngine


class ExactTruncatedEngine(TruncatedEngine, ExactEngine):
    """Generates with the trainer's arithmetic, and reports the tokens that were left to draw from."""


build_exact_truncated_engine = partial(build_native_engine, kind=ExactTruncatedEngine)
