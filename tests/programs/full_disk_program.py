"""Run on 2 ranks: rank 0 cannot write a model while rank 1 waits for it; each writes the message that its error gives.

usage: full_disk_program.py FOLDER
"""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path

import torch
from safetensors import SafetensorError

from lightrl.comm import connect
from lightrl.trainers.disk_errors import describe_disk_error, find_disk_error, raise_with_folder

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    comm = connect(torch.device("cpu"), timedelta(seconds=60))
    try:
        with comm.phase("export"):
            if comm.is_main:
                try:
                    raise SafetensorError("I/O error: No space left on device (os error 28)")
                except SafetensorError as error:
                    raise_with_folder(error, folder / ".best")
            comm.barrier()
    except Exception as error:
        found = find_disk_error(error, folder)
        text = "an error of another kind" if found is None else describe_disk_error(found)
        (folder / f"{comm.rank}.txt").write_text(text)
    comm.close()
