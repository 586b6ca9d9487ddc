"""The folder of a run: the logs in it, the process that owns it, and the inputs that the run began with.

It holds owner.json while a run lives, config.yaml, inputs.json, metrics.jsonl, samples.jsonl, tensorboard/,
checkpoints/, best/, final/ and final_ema/.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import importlib.util
import json
import logging
import math
import os
import re
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from datetime import datetime
from functools import reduce
from itertools import chain, count
from pathlib import Path
from typing import Any, NamedTuple

from lightrl.builtin.task import HELD_OUT
from lightrl.checkpoint import disk_error, save_bytes, save_json
from lightrl.comm import Comm
from lightrl.config import OfflineConfig, RolloutConfig, RunConfig, as_dict, to_yaml
from lightrl.data.mixture import files_of, parts_of
from lightrl.records import Experience
from lightrl.strategy.saving.state_files import HASH_FILE
from lightrl.trainers import earlier_run

logger = logging.getLogger(__name__)

OWNER_NAME = "owner.json"  # host and pid of the process that writes the run's files, for people and error messages
_NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL)  # errors of a file system without locks
_INPUTS_NAME = "inputs.json"
_OF_A_START = {OWNER_NAME, ".tmp-config.yaml"}  # all that a first start leaves if the disk is full
_WHOLE = 64 << 20  # bytes that are hashed: a small file whole, blocks from all over a larger one
_BLOCKS = 64
# package.module:function or path/to/file.py:function, even inside name=[module:one, module:two].
_OBJECT = re.compile(r"([^\s=,:\[\]][^=,:\[\]]*):[A-Za-z_]\w*")
# Options that may name code on which the steps of a run depend; a kind of run may lack some.
_NAMING = (
    *("strategy", "engine", "reward", "rollout.workflow", "rollout.workflow_args", "rollout.filter", "data.curriculum"),
    *(f"algorithm.{kind}" for kind in ("advantage", "loss", "aggregation", "correction", "kl_estimator")),
)

_Columns = Callable[[Experience], Mapping[str, Any]]
TrainerConfig = RolloutConfig | OfflineConfig  # the options of a run that trains

_new_paths: list[Path] = []  # folders that this process has made under runs/


class RunFolder:
    """The folder of a run. Every rank knows the paths; only rank 0 writes."""

    number = 0  # counts the RunFolders of the trainers of a process; 0: made by something else

    def __init__(self, root: Path) -> None:
        self.root, self.checkpoints, self.final = root, root / "checkpoints", root / "final"
        self._metrics, self._samples = root / "metrics.jsonl", root / "samples.jsonl"

    # ---- Opening -----------------------------------------------------------------------------------------------

    def check(self, config: RunConfig) -> None:
        """Raises ValueError if the folder holds anything but this run; changes nothing."""
        if self.root.is_dir() and {path.name for path in self.root.iterdir()} - _OF_A_START:
            earlier_run.require_same(self.root, config)

    def open(self, config: TrainerConfig, steps_done: int) -> None:
        """Saves the config, and drops rows that an interrupted run logged after the checkpoint to continue from."""
        if _newest.get(self.root.resolve(), self.number) != self.number:
            raise _opened_again(self.root)
        self.root.mkdir(parents=True, exist_ok=True)
        save_bytes(self.root / "config.yaml", to_yaml(config).encode())
        note_inputs(self.root, config, continues=steps_done > 0)
        for path in (path for path in (self._metrics, self._samples) if steps_done or path.exists()):
            earlier_run.cut_after(path, steps_done)
        (self.final / HASH_FILE).unlink(missing_ok=True)  # an earlier final/ no longer counts as this run's

    @property
    def is_complete(self) -> bool:
        """Whether the folder has the files of its start, without which no run continues and another may begin there."""
        return all((self.root / name).exists() for name in ("config.yaml", _INPUTS_NAME, OWNER_NAME))

    # ---- Writing -----------------------------------------------------------------------------------------------

    def append_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Adds a line to metrics.jsonl."""
        _append(self._metrics, [{"step": step, **{name: _for_json(float(value)) for name, value in metrics.items()}}])

    def append_samples(self, step: int, experience: Iterable[Experience], more: _Columns = lambda _: {}) -> None:
        """Adds a line per sample to samples.jsonl; more: returns additional entries for a sample."""
        _append(self._samples, [{**self.sample_row(step, item), **more(item)} for item in experience])

    def sample_row(self, step: int, item: Experience) -> dict[str, Any]:
        """Returns the row of a sample in samples.jsonl."""
        sample = item.sample
        return {
            "step": step,
            "position": sample.position,
            "sample": sample.sample_index,
            "prompt": sample.prompt.text,
            "response": sample.text,
            "answer": sample.prompt.answer,
            "reward": item.reward,
            "shaping": item.shaping,
            "advantage": item.advantage,
            "finish_reason": sample.finish_reason,
            "version": sample.versions[-1] if sample.versions else None,
            "oldest_version": sample.oldest_version,
            "status": sample.status.value,
            "ticket": sample.ticket,
        }

    def metrics(self) -> list[dict[str, Any]]:
        """Reads the metrics that have been logged so far."""
        return [json.loads(line) for line in self._metrics.read_bytes().splitlines()] if self._metrics.exists() else []


def open_folder(config: RunConfig, kind: str, comm: Comm) -> tuple[RunFolder, Path | None]:
    """Returns folder and checkpoint. Rank 0 decides, as ranks may see different files; its errors reach all ranks.

    Raises ValueError on every rank if one has other options; only the folders may differ, as that of rank 0 is used.
    """
    folder, checkpoint, problem, owned = RunFolder(Path()), None, "", Path()
    if comm.is_main:
        try:
            folder = RunFolder(Path(os.path.expanduser(config.output_dir) or new_run_path(kind)).absolute())
            folder.check(config)
            owned = own(folder.root) if kind != "rollout" else owned  # whose trainer owns the folder
            if folder.checkpoints.is_dir() or config.resume not in ("auto", "never"):
                checkpoint = earlier_run.find_checkpoint(config, folder.checkpoints)
            folder.number = _newest[folder.root.resolve()] = next(_numbers)
        except (ValueError, OSError) as error:
            disown(owned)
            problem = earlier_run.refusal(folder.root, error)
    found = comm.all_gather_object((folder, checkpoint, problem, as_dict(config) | {"output_dir": ""}))
    folder, checkpoint, problem, options = found[0]
    if problem or any(others != options for *_, others in found):
        raise ValueError(problem or earlier_run.different_ranks([options for *_, options in found]))
    return folder, checkpoint


def new_run_path(kind: str) -> Path:
    """Makes a folder that differs from any other run's, even if that started in the same second."""
    name, number = f"{kind}-{datetime.now():%Y%m%d-%H%M%S}", 1
    while True:
        path = Path("runs") / (name if number == 1 else f"{name}-{number}")
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            number += 1
        else:
            _new_paths.append(path.absolute())
            return path


def remove_empty_runs() -> None:
    """Removes the folder that a refused run has made but not written to, and runs/ if it is then empty."""
    disown_all()
    while _new_paths:
        path = _new_paths.pop()
        with suppress(OSError):
            path.rmdir()
            path.parent.rmdir()


def _append(path: Path, rows: list[dict[str, Any]]) -> None:
    size = path.stat().st_size if path.exists() else 0
    try:
        with path.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in rows)
    except OSError as error:
        with suppress(OSError):
            os.truncate(path, size)  # half a line would corrupt the next one
        raise disk_error(error, path) from error


def _for_json(value: float) -> float | int | None:
    if not math.isfinite(value):
        return None  # JSON has no NaN
    return int(value) if value.is_integer() and abs(value) > 1e6 else value


# ---- The owner of the folder -----------------------------------------------------------------------------------------
# Rank 0 holds a record lock (fcntl) on owner.json. The kernel drops it when the process ends, however it ends, so the
# next start takes over. Network file systems pass such locks on to other hosts.


class _Owned(NamedTuple):
    descriptor: int  # open while this process owns the folder, as closing it drops the lock
    made: list[Path]  # folders that own() made, innermost first


_owned: dict[Path, _Owned] = {}  # by folder, without links, as this process could lock it by each of its names
_newest: dict[Path, int] = {}  # by folder, the number of the RunFolder that the newest trainer of this process has
_numbers = count(1)


def own(root: Path) -> Path:
    """Makes this process the only one that may write a run's folder.

    Returns the folder, or an empty path if this process owns it already. Raises ValueError if another process does.
    """
    if (real := Path(os.path.realpath(root))) in _owned and _is_same_file(_owned[real].descriptor, root / OWNER_NAME):
        return Path()
    made = [path for path in (root, *root.parents) if not path.exists()]
    root.mkdir(parents=True, exist_ok=True)
    descriptor = _lock(root)
    pid, now = os.getpid(), datetime.now().astimezone().isoformat(timespec="seconds")
    record = json.dumps({"host": socket.gethostname(), "pid": pid, "started": _start(pid), "since": now})
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"{record}\n".encode(), 0)
    _owned[real] = _Owned(descriptor, made)
    return root


def disown(root: Path, number: int = 0) -> None:
    """Gives back a folder that this process owns; removes it if it was made for the run and holds nothing else."""
    # Path() stands for none, not for the working folder. A newer trainer, with another number, keeps the folder.
    if root == Path() or (real := root.resolve()) not in _owned or number not in (0, _newest.get(real)):
        return
    descriptor, made = _owned.pop(real)
    with suppress(OSError):  # the folder may be gone, or read-only by now
        if _is_same_file(descriptor, root / OWNER_NAME):
            (root / OWNER_NAME).unlink()
        for path in made:
            path.rmdir()
    os.close(descriptor)


def disown_all() -> None:
    """Gives back all folders that this process owns."""
    for root in list(_owned):
        disown(root)


def _lock(root: Path) -> int:
    """Returns the descriptor of the locked file."""
    path = root / OWNER_NAME
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            _check_owner(root, _read_owner(descriptor), error)
        if _is_same_file(descriptor, path):
            return descriptor
        os.close(descriptor)  # meanwhile its owner has ended and removed the file


def _is_same_file(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except OSError:
        return False


def _check_owner(root: Path, owner: dict[str, Any], error: OSError) -> None:
    """Raises ValueError if the folder has another owner that is alive, or may be."""
    if error.errno in (errno.EACCES, errno.EAGAIN):
        raise _in_use(root, owner)
    if error.errno not in _NO_LOCKS:
        raise error
    if not owner or _is_ours(owner):
        return
    if owner.get("host") != socket.gethostname():
        raise _in_use(
            root, owner, f" Its file system knows no locks: if that run has ended, delete {OWNER_NAME} there."
        )
    if _start(int(owner["pid"])) == owner.get("started") and _is_alive(int(owner["pid"])):
        raise _in_use(root, owner)


def _opened_again(root: Path) -> ValueError:
    return ValueError(
        f"--output_dir {root} belongs to a newer trainer of this process, which opened it after this one. Go on with "
        "the newer one, or make this one again in another folder."
    )


def _in_use(root: Path, owner: dict[str, Any], remedy: str = "") -> ValueError:
    who = f"process {owner.get('pid', 'unknown')} on host {owner.get('host', 'unknown')}"
    return ValueError(
        f"--output_dir {root} is in use by {who} since {owner.get('since', 'now')}. Wait for the end of that run, or "
        f"choose another folder.{remedy}"
    )


def _read_owner(descriptor: int) -> dict[str, Any]:
    """Returns the facts that the owner wrote; empty if it has just begun."""
    try:
        owner = json.loads(os.pread(descriptor, 4096, 0))
        return owner if isinstance(owner, dict) and isinstance(owner.get("pid"), int) else {}
    except ValueError:
        return {}


def _is_ours(owner: dict[str, Any]) -> bool:
    return (owner.get("host"), owner.get("pid")) == (socket.gethostname(), os.getpid())


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's
        return True
    return True


def _start(pid: int) -> int | None:
    """Returns a process's start time in ticks since the machine started, since a pid may be reused."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except (OSError, IndexError, ValueError):
        return None  # no such process, or no /proc


# ---- The inputs ------------------------------------------------------------------------------------------------------
# The hashes of the files that the options name show whether the data or the code has changed since the start.


def note_inputs(root: Path, config: TrainerConfig, *, continues: bool) -> None:
    """Writes the hashes of the files that the options name; warns of files that changed since the run began.

    The run goes on, since the change may be a corrected line. But its numbers are not those of an undisturbed run.
    """
    path = root / _INPUTS_NAME
    found = {str(file): hash_of(file) for file in sorted({*_data_files(config), *_code_files(config)})}
    if continues:
        _warn_of_changes(_read_hashes(path), found)
    save_json(path, found)


def _warn_of_changes(before: Mapping[str, Any], now: Mapping[str, str]) -> None:
    changed = [name for name, value in now.items() if before.get(name, value) != value]
    if changed:
        logger.warning(
            "%s changed since this run began. It goes on, and its steps from here on are not those that the files of "
            "then would have given. To begin anew, choose another --output_dir.",
            ", ".join(changed),
        )


def hash_of(path: Path) -> str:
    """Returns a hash of a file's size and content; of a very large file, only 64 MiB from all over it are read."""
    size = path.stat().st_size
    digest = hashlib.blake2b(str(size).encode(), digest_size=16)
    with path.open("rb") as file:
        if size <= _WHOLE:
            digest.update(file.read())
        else:
            for block in range(_BLOCKS):
                file.seek(block * (size - _WHOLE // _BLOCKS) // (_BLOCKS - 1))
                digest.update(file.read(_WHOLE // _BLOCKS))
    return digest.hexdigest()


def _data_files(config: TrainerConfig) -> Iterator[Path]:
    for source in (config.train_data, config.eval_data, config.data.chat_template_file):
        for part in parts_of(source) if source not in ("", *HELD_OUT) else []:
            yield from files_of(part.name)


def _code_files(config: Any) -> Iterator[Path]:
    """Yields the source files of a user's code on which the run's steps depend."""
    values = (reduce(lambda part, name: getattr(part, name, ""), option.split("."), config) for option in _NAMING)
    texts = chain.from_iterable([value] if isinstance(value, str) else value for value in values)
    yield from filter(None, map(_file_of, chain.from_iterable(map(_OBJECT.findall, texts))))


def _file_of(module: str) -> Path | None:
    """Returns the source file of a module or of a path to one; None if there is no readable file."""
    if module.endswith(".py"):
        return Path(module) if Path(module).is_file() else None
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):  # an argument that only looks like a module's name
        return None
    return Path(spec.origin) if spec is not None and spec.origin and Path(spec.origin).is_file() else None


def _read_hashes(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError):  # written by a version that kept no hashes
        return {}
    return content if isinstance(content, dict) else {}
