"""Forks SGLang's processes from a server that has imported SGLang, in a third of the time; for tests only.

SGLang itself starts fresh interpreters. The server keeps the environment in which the first engine was started.
"""

import multiprocessing

_PRELOADED = [
    "sglang.srt.managers.scheduler",
    "sglang.srt.managers.detokenizer_manager",
    "sglang.srt.models.registry",
]


def enable():
    set_start_method = multiprocessing.set_start_method
    multiprocessing.set_forkserver_preload(_PRELOADED)
    multiprocessing.set_start_method = lambda method, force=False: set_start_method(
        "forkserver" if method == "spawn" else method, force=True
    )
