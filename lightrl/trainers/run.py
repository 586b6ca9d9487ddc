"""What a trainer starts from: `open_run` finds the strategy, the run's folder, a checkpoint, data and tokenizer.

The folder holds owner.json while a run lives, config.yaml, metrics.jsonl, samples.jsonl, tensorboard/, checkpoints/,
final/ and final_ema/.
"""

from __future__ import annotations

import errno
import fcntl
import json
import math
import os
import socket
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn
from transformers import PreTrainedTokenizerBase

from lightrl.builtin.model import builtin_model_path
from lightrl.builtin.task import made_model
from lightrl.comm import Comm
from lightrl.config import BUILTIN_MODEL, OfflineConfig, RolloutConfig, RunConfig, template_arguments, to_yaml
from lightrl.data.chat_arguments import set_template_arguments
from lightrl.data.media import PromptEncoder
from lightrl.data.prompts import held_out_of, load_records
from lightrl.models.fixed_rope import describe_fixed, fix_frequencies, fixed_length
from lightrl.models.lora import WithoutAdapters, add_adapters
from lightrl.models.multimodal import FAMILIES, MediaProcessor
from lightrl.models.packed_attention import varies_with_length
from lightrl.models.policy import (
    Policy,
    check_model_folder,
    load_config,
    load_policy,
    load_tokenizer,
    needs_score_check,
    stated_context,
)
from lightrl.models.routing_replay import attach_replay
from lightrl.models.score_check import check_scores
from lightrl.records import Experience
from lightrl.rollout.workflow import Workflow, load_workflow
from lightrl.strategy import StrategyBase, create_strategy
from lightrl.strategy.serving.adapter_source import check_adapters, serve_as_configured
from lightrl.trainers import earlier_run
from lightrl.trainers.run_inputs import note_inputs
from lightrl.trainers.sound_checkpoint import newest_sound

TrainerConfig = RolloutConfig | OfflineConfig

OWNER_NAME = "owner.json"  # host and pid of the process that writes the run's files, for people and for the refusal
_NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL)  # what a file system without locks answers

_new_paths: list[Path] = []  # that this process has made under runs/


@dataclass(frozen=True, slots=True, kw_only=True)
class RunContext:
    """Everything that a trainer needs before it builds its models. It is the same on every rank."""

    config: Any  # the trainer's own kind of RolloutConfig or OfflineConfig
    strategy: StrategyBase
    folder: RunFolder
    checkpoint: Path | None  # to continue from; None starts at step 0
    model_path: str  # a folder or a Hugging Face name
    context: int  # tokens of prompt and response together that the model takes
    tokenizer: PreTrainedTokenizerBase
    media: MediaProcessor | None  # None: the model takes text alone
    encoder: PromptEncoder | None  # turns prompts with images into model inputs; None without media
    train_records: Sequence[Any]  # the lines of --train_data
    eval_records: Sequence[Any]
    workflow: Workflow | None = None  # that makes the samples; None: one response to each prompt
    longest: list[int] = field(default_factory=list)  # tokens of the longest sequence of each data set read so far


def open_run(config: TrainerConfig, *, kind: str, strategy: StrategyBase | None = None) -> RunContext:
    """Joins the world and checks folder, data and model files, in this order, before any weights are loaded.

    Args:
        config: the options of the run.
        kind: the trainer's name, used for a new folder under runs/.
        strategy: the caller's own strategy; None creates the one that the config names.
    """
    if config.lora.is_on:
        check_adapters(config)
    workflow = load_workflow(config.rollout) if isinstance(config, RolloutConfig) and config.rollout.workflow else None
    strategy = strategy or create_strategy(config)
    strategy.setup_distributed()
    comm, remote_code = strategy.comm, config.trust_remote_code
    folder, checkpoint = _open_folder(config, kind, comm)
    if checkpoint is not None:
        checkpoint = newest_sound(checkpoint, comm, resume=config.resume)
    with comm.phase("set-up", local=True):
        train_records = load_records(config.train_data, stream=config.data.stream)
        eval_source = config.eval_data or held_out_of(config.train_data)
        eval_records = load_records(eval_source) if eval_source else []
    model_path = _find_model(config.model, strategy)
    with comm.phase("set-up", local=True):
        model_config = load_config(model_path, trust_remote_code=remote_code)
        strategy.check_model_config(model_config)
        tokenizer = load_tokenizer(model_path, trust_remote_code=remote_code)
        takes_images = model_config.model_type in FAMILIES
        media = MediaProcessor.load(model_path, trust_remote_code=remote_code) if takes_images else None
        if config.data.chat_template_args:
            _set_template(config, tokenizer, media)
    strategy.tokenizer, strategy.media = tokenizer, media
    return RunContext(
        config=config,
        strategy=strategy,
        folder=folder,
        checkpoint=checkpoint,
        model_path=model_path,
        context=stated_context(model_config.get_text_config()),
        tokenizer=tokenizer,
        media=media,
        encoder=PromptEncoder(media) if media is not None else None,
        train_records=train_records,
        eval_records=eval_records,
        workflow=workflow,
    )


def _set_template(config: TrainerConfig, tokenizer: PreTrainedTokenizerBase, media: MediaProcessor | None) -> None:
    for renderer in (tokenizer, media.processor) if media else (tokenizer,):
        set_template_arguments(renderer, template_arguments(config.data))


def _open_folder(config: RunConfig, kind: str, comm: Comm) -> tuple[RunFolder, Path | None]:
    """Returns folder and checkpoint. Rank 0 decides, since ranks may see different files; its errors reach all."""
    result: tuple[Path, Path | None] | str = ""
    if comm.is_main:
        root = Path()
        try:
            root = (Path(config.output_dir) if config.output_dir else new_run_path(kind)).absolute()
            folder = RunFolder(root)
            folder.check(config)
            if kind != "rollout":  # such a rank generates for a trainer, whose folder it is
                own(root)
            has_checkpoints = folder.checkpoints.is_dir() or config.resume not in ("auto", "never")
            result = root, earlier_run.find_checkpoint(config, folder.checkpoints) if has_checkpoints else None
        except (ValueError, OSError) as error:
            disown(root)
            result = str(error)
    result = comm.broadcast_object(result)
    if isinstance(result, str):
        raise ValueError(result)
    return RunFolder(result[0]), result[1]


def _find_model(model: str, strategy: StrategyBase) -> str:
    """Returns the path or name to load. Rank 0 makes the built-in model while the others wait."""
    if model != BUILTIN_MODEL:
        with strategy.comm.phase("set-up", local=True):
            check_model_folder(model)
        return model
    path = ""
    with strategy.comm.phase("building the built-in model", local=True):
        if strategy.comm.is_main:
            path = str(made_model() or builtin_model_path(on_progress=strategy.print))
    return strategy.comm.broadcast_object(path)


# ---- Models ----------------------------------------------------------------------------------------------------------


def load_start_policy(run: RunContext, *, is_reference: bool = False) -> Policy:
    """Loads the model that the run starts from, on this rank and not yet prepared; to be trained, with its adapters."""
    materialize, remote_code = run.strategy.materializes_weights, run.config.trust_remote_code
    policy = load_policy(
        run.model_path, materialize=materialize, trust_remote_code=remote_code, is_reference=is_reference
    )
    if varies_with_length(policy.hf.config):
        fix_for_run(run, policy)
    if (run.config.lora.is_on or run.config.routing.is_on) and not is_reference:
        _attach_options(run, policy)
    if materialize and not is_reference and needs_score_check(policy.hf):
        check_scores(policy, next(policy.parameters()).device)
    return policy


def _attach_options(run: RunContext, policy: Policy) -> None:
    """Adds the adapters and the replay of routers that the options ask for."""
    if run.config.lora.is_on:
        add_adapters(policy.hf, run.config.lora, seed=run.config.seed)
        serve_as_configured(run.strategy, run.config)
    if run.config.routing.is_on:
        attach_replay(policy, keeps_logits=run.config.routing.has_losses)


def fix_for_run(run: RunContext, model: nn.Module) -> None:
    """Fixes rotary frequencies that vary with the length for the longest sequence in the data, if there are any."""
    if run.longest and fixed_length(model) is not None:
        fix_frequencies(model, max(run.longest))
        run.strategy.print(f"{type(model).__name__}: {describe_fixed(model)}.")


def prepare_reference(run: RunContext, policy: nn.Module) -> nn.Module:
    """Returns the frozen model that the policy is compared with: itself without its adapters, or a copy of the start.

    Call it after the policy was prepared: before that, rank 0 would hold both models whole.
    """
    if run.config.lora.is_on:
        return WithoutAdapters(policy)
    with run.strategy.comm.phase("loading the reference model", local=True):
        reference = load_start_policy(run, is_reference=True)
    return run.strategy.prepare_frozen(reference)


# ---- The folder ------------------------------------------------------------------------------------------------------


class RunFolder:
    """The folder of a run. Every rank knows the paths; only rank 0 writes."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.checkpoints = root / "checkpoints"
        self.final = root / "final"
        self.final_ema = root / "final_ema"
        self._metrics = root / "metrics.jsonl"
        self._samples = root / "samples.jsonl"

    # ---- Opening -----------------------------------------------------------------------------------------------

    def check(self, config: RunConfig) -> None:
        """Raises ValueError if the folder holds anything but this run; changes nothing."""
        if self.root.is_dir() and any(path.name != OWNER_NAME for path in self.root.iterdir()):
            earlier_run.require_same(self.root, config)

    def open(self, config: RunConfig, steps_done: int) -> None:
        """Saves the config, and drops what an interrupted run logged after the checkpoint that this one continues."""
        self.root.mkdir(parents=True, exist_ok=True)
        (self.root / "config.yaml").write_text(to_yaml(config))
        note_inputs(self.root, config, continues=steps_done > 0)
        for path in (self._metrics, self._samples):
            if path.exists():
                earlier_run.cut_after(path, steps_done)

    # ---- Writing -----------------------------------------------------------------------------------------------

    def append_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Adds a line to metrics.jsonl."""
        _append(self._metrics, [{"step": step, **{name: _number(value) for name, value in metrics.items()}}])

    def append_samples(self, step: int, experience: Iterable[Experience]) -> None:
        """Adds a line per sample to samples.jsonl."""
        _append(self._samples, [self.sample_row(step, item) for item in experience])

    def sample_row(self, step: int, item: Experience) -> dict[str, Any]:
        """Returns what samples.jsonl says of a sample."""
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
        """Reads what has been logged so far."""
        return [json.loads(line) for line in self._metrics.read_text().splitlines()] if self._metrics.exists() else []


def new_run_path(kind: str) -> Path:
    """Makes a folder that no other run has, even one started in the same second."""
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
    """Removes the folder that a refused run has made and not written to, and runs/ with its last folder."""
    disown_all()
    while _new_paths:
        path = _new_paths.pop()
        with suppress(OSError):
            path.rmdir()
            path.parent.rmdir()


def _append(path: Path, rows: list[dict[str, Any]]) -> None:
    size = path.stat().st_size if path.exists() else 0
    try:
        with path.open("a") as file:
            file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    except OSError:
        with suppress(OSError):
            os.truncate(path, size)  # half a line would spoil the next one
        raise


def _number(value: float) -> float | int | None:
    if isinstance(value, float) and not math.isfinite(value):
        return None  # JSON has no NaN
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) > 1e6 else value


# ---- The owner of the folder -----------------------------------------------------------------------------------------
# Rank 0 holds a record lock (fcntl) on owner.json. The kernel drops it when the process ends, however it ends, so the
# next start takes over. Network file systems pass such locks on to other hosts.


class _Owned(NamedTuple):
    descriptor: int  # open while this process owns the folder: closing it drops the lock
    made: list[Path]  # folders that own() made, the innermost first


_owned: dict[Path, _Owned] = {}  # by folder


def own(root: Path) -> None:
    """Makes this process the only one that writes a run's folder.

    Raises ValueError if another process does, and if the folder cannot be written. A process may open a folder
    again that it owns.
    """
    if root in _owned and _is_same_file(_owned[root].descriptor, root / OWNER_NAME):
        return
    made = [path for path in (root, *root.parents) if not path.exists()]
    try:
        root.mkdir(parents=True, exist_ok=True)
        descriptor = _lock(root)
    except OSError as error:
        earlier_run.refuse(root, error)
    now = datetime.now().astimezone().isoformat(timespec="seconds")
    pid = os.getpid()
    record = json.dumps({"host": socket.gethostname(), "pid": pid, "started": _start(pid), "since": now})
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"{record}\n".encode(), 0)
    _owned[root] = _Owned(descriptor, made)


def disown(root: Path) -> None:
    """Gives back a folder that this process owns, and removes it if it holds nothing else and was made for the run."""
    if root not in _owned:
        return
    descriptor, made = _owned.pop(root)
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
            _check_owner(root, _read(descriptor), error)
        if _is_same_file(descriptor, path):
            return descriptor
        os.close(descriptor)  # its owner has ended and removed the file meanwhile


def _is_same_file(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except OSError:
        return False


def _check_owner(root: Path, owner: dict[str, Any], error: OSError) -> None:
    """Raises ValueError if the folder has another owner that lives, or may live."""
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


def _in_use(root: Path, owner: dict[str, Any], remedy: str = "") -> ValueError:
    who = f"process {owner.get('pid', 'unknown')} on host {owner.get('host', 'unknown')}"
    return ValueError(
        f"--output_dir {root} is in use by {who} since {owner.get('since', 'now')}. Wait for the end of that run, or "
        f"choose another folder.{remedy}"
    )


def _read(descriptor: int) -> dict[str, Any]:
    """Returns what the owner wrote; empty if it has just begun."""
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
    """Returns when a process began, in ticks since the machine started: a pid alone may be that of a later one."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except (OSError, IndexError, ValueError):
        return None  # no such process, or no /proc
