"""Layers that predict further tokens (MTP): a model of transformers is loaded, and so saved, without them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

STATED = re.compile(r'"(num_nextn_predict_layers|mtp_num_hidden_layers|num_mtp_layers)": [1-9]\d*')
_OF_SUCH_A_LAYER = re.compile("mtp|nextn|eh_proj")  # in the names of weights


def drop_absent_layers(config_file: Path, saved: Iterable[str]) -> None:
    """Writes into a saved config that the model has no such layers, unless their weights are among the saved names.

    Programs that read the number look for the weights. transformers even states one layer of a DeepSeek-V3 that has
    none.
    """
    if not any(map(_OF_SUCH_A_LAYER.search, saved)):
        stated = config_file.read_text(encoding="utf-8")
        config_file.write_text(STATED.sub(r'"\1": 0', stated), encoding="utf-8")
