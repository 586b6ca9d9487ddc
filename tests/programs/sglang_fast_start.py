"""Starts SGLang's processes from one server that has imported SGLang already: a third of the time. For tests only.

SGLang asks for fresh interpreters. The server takes over the environment of the first engine's start.
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
