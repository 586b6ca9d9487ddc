"""TrainingStateSaver: what a checkpoint holds of a run, written by all ranks and read at any world size."""

from __future__ import annotations

import io
import pickle
import random
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Adam, Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from lightrl.checkpoint import open_directory, resolve_checkpoint
from lightrl.comm import Comm
from lightrl.models.lora import is_adapter, trained_parameters
from lightrl.models.policy import persistent_buffers
from lightrl.strategy.layout.plain import PlainLayout, has_adapters
from lightrl.strategy.optim.muon import MuonWithAdamW
from lightrl.strategy.optim.optimizers import TrainedModels
from lightrl.strategy.results import TrainedModel
from lightrl.strategy.saving.registration import owner_of
from lightrl.strategy.saving.state_files import StateWriter, write_state_hash
from lightrl.strategy.saving.state_reader import TensorReader, load_object, load_without_code

_PLAIN = (dict, list, tuple, str, int, float, bool, type(None))
# Keys that torch's schedules write into parameter groups. OneCycleLR changes the momentum or the first beta too, and
# keeps its own numbers there.
_MOVED = ("lr", "initial_lr", "betas", "momentum", "max_lr", "min_lr", "max_momentum", "base_momentum", "swa_lr")


class SavedStrategy(Protocol):
    """The members of a strategy that the saver needs to write its state."""

    global_step: int
    num_generations: int  # counts the calls that drew without a seed

    @property
    def comm(self) -> Comm: ...

    @property
    def layout(self) -> PlainLayout: ...

    @property
    def trained(self) -> TrainedModels: ...

    def after_forward_only(self, model: nn.Module) -> None: ...


class SaveRequest(NamedTuple):
    """A request to save: where the checkpoint goes, what it holds besides the model, how many are kept."""

    root: Path
    tag: str | None = None  # name of its folder; None names the checkpoint by the step
    keep: int = 3
    max_bytes: int = 0  # for all that are kept; 0: no limit
    client_state: Mapping[str, Any] | None = None  # the caller's
    is_latest: bool = True  # a load without a tag may choose it
    companions: Mapping[str, nn.Module] = MappingProxyType({})  # models by their folder in the checkpoint


class Wanted(NamedTuple):
    """Names the parts of a checkpoint to load."""

    strict: bool = True  # refuse a checkpoint whose parameter names differ from the model's
    optimizer: bool = True
    schedule: bool = True
    only_weights: bool = False  # only the model


EVERYTHING = Wanted()


class TrainingStateSaver:
    """Saves and loads models, optimizers, schedules, hooks, random states, the step and the caller's own state."""

    make_writer: type[StateWriter] = StateWriter

    def __init__(self, strategy: SavedStrategy) -> None:
        self._strategy = strategy

    # ---- Saving ------------------------------------------------------------------------------------------------

    def save(self, model: nn.Module, request: SaveRequest) -> None:
        """Writes a checkpoint, which is complete once all ranks have written it.

        If nobody sets the step, every save makes a new folder.
        """
        self.finish()
        directory = open_directory(request.root, request.tag, keep=request.keep, max_bytes=request.max_bytes)
        models = {"": model, **request.companions}  # by folder in the checkpoint
        client_state = dict(request.client_state or {})
        for item in models.values():
            self._trained(item)
        comm, step = self._strategy.comm, self._strategy.global_step
        with comm.phase("checkpoint", local=True):
            if not _is_plain(client_state):
                _check_loadable(client_state, "client_state[{!r}]")
            step = step or directory.next_step()  # nobody counts steps, so saves are counted
            path = directory.begin(step, request.companions) if comm.is_main else None
        folder = comm.broadcast_object(path)
        assert folder is not None
        with comm.phase("checkpoint"):
            writers = [self._write(folder / key, models[key], {} if key else client_state) for key in sorted(models)]
        with comm.phase("checkpoint", local=True):
            for error in (writer.error for writer in writers if writer.error is not None):
                raise error

        def commit() -> None:
            for name in models:
                write_state_hash(folder / name)
            directory.commit(step, is_latest=request.is_latest)

        self._complete(writers, commit)

    def _complete(self, writers: Sequence[StateWriter], commit: Callable[[], None]) -> None:
        """Turns the written files into a checkpoint, on rank 0."""
        with self._strategy.comm.phase("checkpoint", local=True):
            if self._strategy.comm.is_main:
                commit()

    def finish(self) -> None:
        """Completes a save in progress, if saves are written in the background; every rank must call it."""

    def _write(self, folder: Path, model: nn.Module, client_state: dict[str, Any]) -> StateWriter:
        """Writes everything that one model needs to continue; returns the writer, which may have jobs left."""
        strategy, comm, trained = self._strategy, self._strategy.comm, self._trained(model)
        owner = model if trained is None else trained.model
        strategy.after_forward_only(owner)
        strategy.trained.require_on_device(owner, *([] if trained is None else [trained.optimizer]))
        writer = self.make_writer(folder, comm)
        writer.add_tensors("model", strategy.layout.pieces(self._saved_tensors(model)))
        state: dict[str, Any] = {"global_step": strategy.global_step, "client_state": client_state}
        state["num_generations"] = comm.max_int(strategy.num_generations)  # a rank may have sampled on its own
        if trained is not None:
            for hook in strategy.trained.hooks_of(trained.optimizer):
                hook.write_tensors(lambda kind, named: writer.add_tensors(kind, strategy.layout.pieces(named)))
                state |= hook.state(trained.optimizer)
            states = strategy.layout.optimizer_states(owner, trained.optimizer)
            writer.add_tensors("optimizer", strategy.layout.pieces(states))
            state["has_optimizer"] = True
            state |= _schedule_state(trained)
        writer.add_object(f"rng-rank{comm.rank:05d}-of-{comm.world:05d}.pt", _random_state())
        if comm.is_main:
            writer.add_object("state.pt", state)
        return writer

    def _trained(self, model: nn.Module, *, must_train: bool = True) -> TrainedModel | None:
        """Returns the entry that trains this model; raises ValueError if a checkpoint would leave out a part of it."""
        entries = [*self._strategy.trained.entries, *self._strategy.trained.seen]
        known = [entry for entry in entries if entry.model is model]
        return known[0] if len(known) == 1 else owner_of(model, entries, must_train=must_train)

    def _saved_tensors(self, model: nn.Module) -> list[tuple[str, Tensor]]:
        """Returns every parameter once and the persistent buffers; with adapters, only these and what is trained."""
        detached, is_adapted = self._strategy.layout.detached, has_adapters(model)
        named = trained_parameters(model) if is_adapted else sorted(model.named_parameters())
        saved = [(name, detached(parameter)) for name, parameter in named]
        return saved if is_adapted else [*saved, *persistent_buffers(model)]

    # ---- Loading -----------------------------------------------------------------------------------------------

    def load(
        self,
        model: nn.Module,
        load_dir: Path,
        *,
        tag: str | None = None,
        wanted: Wanted = EVERYTHING,
        companions: Mapping[str, nn.Module] | None = None,
    ) -> tuple[Path | None, Any]:
        """Returns (path, client_state); (None, None) if there is no complete checkpoint and no tag was given."""
        self.finish()
        comm = self._strategy.comm
        with comm.phase("checkpoint", local=True):  # rank 0 chooses, so that all ranks load the same checkpoint
            chosen = resolve_checkpoint(load_dir, tag) if comm.is_main else None
        path = comm.broadcast_object(chosen)
        if path is None:
            return None, None
        for name, companion in sorted((companions or {}).items()):
            if not (path / name / "state.pt").is_file():
                raise ValueError(f"{path} holds no {name}: it was saved by a run that had none.")
            self._read(path / name, companion, wanted)
        return path, self._read(path, model, wanted)  # last, so that its random state is the one that remains

    def _read(self, path: Path, model: nn.Module, wanted: Wanted) -> Any:
        """Reads the files that _write() wrote; returns the client_state."""
        strategy = self._strategy
        state = load_object(path / "state.pt")
        must_train = not wanted.only_weights and (wanted.optimizer or wanted.schedule)
        trained = self._trained(model, must_train=must_train)
        owner = model if trained is None else trained.model
        hooks = strategy.trained.hooks_of(trained.optimizer) if trained is not None else ()
        if trained is not None and any(hook.tensors() for hook in hooks):
            strategy.trained.require_on_device(trained.optimizer)
        self._read_model(path, model, owner, strict=wanted.strict)
        for hook in hooks:
            hook.read_tensors(partial(TensorReader, path), {} if wanted.only_weights else state)
        if wanted.only_weights:
            return state["client_state"]
        if wanted.optimizer and trained is not None:
            self._read_optimizer(path, trained, state, strict=wanted.strict)
        if wanted.schedule and trained is not None:
            _restore_schedule(trained, state, path)
        strategy.global_step = state["global_step"]
        strategy.num_generations = state.get("num_generations", 0)
        random_states = path / f"rng-rank{strategy.comm.rank:05d}-of-{strategy.comm.world:05d}.pt"
        if random_states.exists():  # at another world size, the ranks' streams differ anyway
            _set_random_state(load_object(random_states))
        return state["client_state"]

    def _read_model(self, path: Path, model: nn.Module, owner: nn.Module, *, strict: bool) -> None:
        strategy, layout = self._strategy, self._strategy.layout
        reader = TensorReader(path, "model")
        strategy.trained.require_on_device(owner)
        strategy.after_forward_only(owner)
        named = dict(self._saved_tensors(model))
        missing, unknown = sorted(set(named) - reader.names), sorted(reader.names - set(named))
        if strict and (missing or unknown):
            raise _does_not_fit(path, missing, unknown)
        for name in sorted(set(named) & reader.names):
            saved_shape, shape = reader.shape_of(name), layout.whole_shape(named[name])
            if saved_shape != shape:
                raise ValueError(f"{path}: {name} has shape {list(saved_shape)}, the model's {list(shape)}.")
            layout.read_into(named[name], reader, name)
        layout.finish_writing(owner)
        layout.drop_gradients(owner)  # they belong to the previous weights

    def _read_optimizer(self, path: Path, trained: TrainedModel, state: dict[str, Any], *, strict: bool) -> None:
        model, optimizer = trained.model, trained.optimizer
        if not state.get("has_optimizer"):
            raise ValueError(f"{path} holds no optimizer states. Pass load_optimizer_states=False to go on without.")
        reader = TensorReader(path, "optimizer")
        unknown = {name.rpartition("/")[0] for name in reader.names} - {name for name, _ in model.named_parameters()}
        if strict and unknown:
            raise ValueError(
                f"{path} holds optimizer states of parameters that the model lacks: {', '.join(sorted(unknown)[:5])}. "
                "Give the modules that were prepared and saved, or pass load_optimizer_states=False."
            )
        _require_its_states(path, trained, reader)
        self._strategy.trained.require_on_device(optimizer)
        optimizer.state.clear()
        for hook in self._strategy.trained.hooks_of(optimizer):
            hook.restore(optimizer, state)
        self._strategy.layout.load_optimizer_states(model, optimizer, reader)


def _require_its_states(path: Path, trained: TrainedModel, reader: TensorReader) -> None:
    """Raises ValueError if AdamW or Muon would continue states of another kind, as with another --optim.name."""
    names = {parameter: name for name, parameter in trained.model.named_parameters()}
    for group in trained.optimizer.param_groups:
        its_own = "momentum_buffer" if group.get("is_muon") else "exp_avg"
        for keys in (reader.keys_of(names.get(parameter, "")) for parameter in group["params"]):
            if keys and its_own not in keys and isinstance(trained.optimizer, Adam | MuonWithAdamW):
                raise ValueError(
                    f"{path} holds optimizer states ({', '.join(keys)}) that {type(trained.optimizer).__name__} cannot "
                    "continue. Give the --optim.name of the run that wrote it, or start anew from its model: --model "
                    "with final/ of its folder. In Python, load_optimizer_states=False goes on without the states."
                )


def _is_plain(value: Any) -> bool:
    """Returns whether a value consists only of Python's own numbers and text, which any file can hold."""
    parts = (*value, *value.values()) if type(value) is dict else value if type(value) in (list, tuple) else ()
    return type(value) in _PLAIN and all(map(_is_plain, parts))


def _check_loadable(values: Mapping[str, Any], name: str) -> None:
    """Refuses a value that could only be loaded by running code from the file; name has a {} for its key."""
    for key, value in values.items():
        buffer = io.BytesIO()
        try:
            torch.save(value, buffer)
            buffer.seek(0)
            load_without_code(buffer)
        except (pickle.PickleError, AttributeError, TypeError) as error:  # the last two: not picklable
            raise _not_loadable(name.format(key), value) from error


def _not_loadable(name: str, value: Any) -> ValueError:
    return ValueError(
        f"{name} is a {type(value).__name__}, which cannot be loaded safely. Give tensors, numbers, text, and lists or "
        "dicts of them."
    )


# ---- Schedules ---------------------------------------------------------------------------------------------------


def _schedule_state(trained: TrainedModel) -> dict[str, Any]:
    """Returns the checkpoint's entries that _restore_schedule() reads."""
    scheduler: Any = trained.scheduler
    if isinstance(scheduler, LambdaLR):
        state = {**scheduler.state_dict(), "lr_lambdas": [None] * len(scheduler.lr_lambdas)}
    else:
        state = _state_without_functions(scheduler)
    groups = trained.optimizer.param_groups
    rates = [{key: _off_device(group[key]) for key in _MOVED if key in group} for group in groups]
    return {"scheduler": state, "rates": rates}


def _state_without_functions(scheduler: Any) -> Any:
    """Returns the saved state of any other schedule, or of none; functions come from the new run."""
    if scheduler is None:
        return None
    state = {key: value for key, value in scheduler.state_dict().items() if not callable(value)}
    _check_loadable(state, f"{type(scheduler).__name__}.{{}}")
    return state


def _off_device(value: Any) -> Any:
    return float(value) if isinstance(value, Tensor) else value


def _restore_schedule(trained: TrainedModel, state: dict[str, Any], path: Path) -> None:
    """Restores the position of the schedule, and the rates that it has reached.

    All schedules that the options name are LambdaLRs, whose rates come from this run's options. Any other schedule
    computes a rate from the last one, so its rates come from the checkpoint, as they do without a schedule.
    """
    scheduler: LRScheduler | None = trained.scheduler
    saved: Any = state.get("scheduler")
    if (scheduler is None) is not (saved is None):
        raise _no_counterpart(path, is_saved=scheduler is None)
    if isinstance(scheduler, LambdaLR):
        restore_lambdas(scheduler, saved)
        return
    if scheduler is not None:
        scheduler.load_state_dict(saved)
    _restore_rates(trained.optimizer, _saved_rates(state), path)


def restore_lambdas(scheduler: LambdaLR, state: Mapping[str, Any]) -> None:
    """Moves a schedule to a saved position, and the rates of the optimizer to those that it has there."""
    scheduler.last_epoch, scheduler._step_count = state["last_epoch"], state["_step_count"]
    rates = [base * f(scheduler.last_epoch) for base, f in zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)]
    for group, rate in zip(scheduler.optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    scheduler._last_lr = rates


def _saved_rates(state: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns what to write into each group; a checkpoint of version 0.1 holds only the rates of a schedule."""
    if "rates" in state:
        rates: list[dict[str, Any]] = state["rates"]
        return rates
    return [{"lr": rate} for rate in (state.get("scheduler") or {}).get("_last_lr", [])]


def _restore_rates(optimizer: Optimizer, rates: list[dict[str, Any]], path: Path) -> None:
    groups = optimizer.param_groups
    if rates and len(rates) != len(groups):
        raise ValueError(
            f"{path} holds the rates of {len(rates)} parameter groups, and the optimizer has {len(groups)}. Build the "
            "same groups, or pass load_lr_scheduler_states=False to go on with the rates of this run."
        )
    for group, saved in zip(groups, rates, strict=False):
        for key, value in saved.items():
            if isinstance(group.get(key), Tensor):  # a capturable optimizer reads it on the device
                group[key].fill_(value)
            else:
                group[key] = value


def _no_counterpart(path: Path, *, is_saved: bool) -> ValueError:
    if is_saved:
        return ValueError(
            f"{path} holds a learning-rate schedule, but none is registered with this model. Pass (model, optimizer, "
            "scheduler) to prepare() before the load, or load_lr_scheduler_states=False to go on without."
        )
    return ValueError(f"{path} holds no learning-rate schedule. Pass load_lr_scheduler_states=False to go on.")


# ---- Random states -----------------------------------------------------------------------------------------------


def _random_state() -> dict[str, Any]:
    version, internal, gauss = random.getstate()
    name, keys, *rest = np.random.get_state(legacy=True)
    state: dict[str, Any] = {"torch": torch.get_rng_state(), "python": [version, list(internal), gauss]}
    state["numpy"] = [name, [int(key) for key in keys], *[float(item) for item in rest]]
    if torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _set_random_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    if "numpy" in state:
        name, keys, position, has_gauss, cached = state["numpy"]
        np.random.set_state((name, np.array(keys, dtype="uint32"), int(position), int(has_gauss), cached))


def _does_not_fit(path: Path, missing: list[str], unknown: list[str]) -> ValueError:
    if any(map(is_adapter, unknown)) != any(map(is_adapter, missing)):
        held, wanted = ("adapters", "all weights") if any(map(is_adapter, unknown)) else ("all weights", "adapters")
        return ValueError(
            f"{path} holds {held}, and this run trains {wanted} (--lora.*). Give the --lora.* options of the run that "
            "wrote it, or start anew from its model: --model with final/ of its folder."
        )
    return ValueError(
        f"{path} does not fit the model: missing {missing[:5] or 'nothing'}, unknown {unknown[:5] or 'nothing'}."
    )
