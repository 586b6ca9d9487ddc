"""Loggers of a trainer."""

import errno
import resource
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from lightrl.comm import Comm
from lightrl.config import CheckpointConfig, GRPOConfig, JudgeConfig, LateMistakeError, RolloutLogConfig
from lightrl.trainers.loggers.attach import LoggedRun, Loggers, public, public_options
from lightrl.trainers.run_folder import RunFolder


class Noted:
    """A logger that keeps what it gets."""

    made: list["Noted"] = []  # noqa: RUF012

    def __init__(self, run: LoggedRun) -> None:
        self.run, self.rows, self.is_closed = run, [], False  # type: ignore[var-annotated]
        Noted.made.append(self)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.rows.append((step, dict(metrics)))

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> str:
    module = ModuleType("own_loggers")
    module.Noted = Noted  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "own_loggers", module)
    Noted.made = []
    return "own_loggers:Noted"


def trainer_of(folder: Path, name: str, *, rank: int = 0, on_disk_error: Any = "stop") -> Any:
    comm = Comm()
    comm.rank = rank
    checkpoint = CheckpointConfig(on_disk_error=on_disk_error)
    return SimpleNamespace(
        config=GRPOConfig(log=RolloutLogConfig(to=name), checkpoint=checkpoint),
        strategy=SimpleNamespace(comm=comm),
        folder=RunFolder(folder),
        step_index=3,
    )


def test_a_logger_gets_the_metrics_of_each_step(tmp_path: Path, noted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    loggers = Loggers(trainer_of(tmp_path, noted))
    loggers.after_metrics(4, {"loss": 0.5})
    (logger,) = Noted.made
    assert logger.rows == [(4, {"loss": 0.5})]
    assert (logger.run.name, logger.run.step, logger.run.options["num_prompts"]) == (tmp_path.name, 3, 16)
    loggers.close()
    assert logger.is_closed
    Loggers(trainer_of(tmp_path, noted))
    assert Noted.made[1].run.id == logger.run.id  # a run that goes on is the same run
    monkeypatch.chdir(tmp_path)
    Loggers(trainer_of(Path(), noted))
    assert Noted.made[2].run.name == tmp_path.name  # also of a folder that is given as "."


def test_a_logger_is_told_of_a_failure_if_it_has_a_method_for_it(tmp_path: Path, noted: str) -> None:
    loggers = Loggers(trainer_of(tmp_path, noted))
    loggers.after_failure(ValueError("wrong"))
    told: list[BaseException] = []
    Noted.made[0].fail = told.append  # type: ignore[attr-defined]
    error = KeyboardInterrupt()
    loggers.after_failure(error)
    assert told == [error]


@pytest.mark.parametrize("moment", ["made", "logs"])
def test_a_logger_that_leaves_settings_of_torch_changed_is_named(
    tmp_path: Path, noted: str, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    loggers = Loggers(trainer_of(tmp_path, noted)) if moment == "logs" else None
    monkeypatch.setattr(Noted, "log" if loggers else "__init__", lambda *_: torch.set_default_dtype(torch.float64))
    try:
        with pytest.raises(RuntimeError, match=r"The logger .*Noted.* has changed settings of torch for the rest"):
            loggers.after_metrics(4, {}) if loggers else Loggers(trainer_of(tmp_path, noted))
    finally:
        torch.set_default_dtype(torch.float32)


class Unclosed:
    def __init__(self, run: LoggedRun) -> None: ...

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...


class Unaware:
    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class Stepless(Unclosed):
    def log(self, metrics: Mapping[str, float]) -> None: ...  # type: ignore[override]

    def close(self) -> None: ...


class Asking(Unclosed):
    def close(self, exit_code: int) -> None: ...


class Awaiting(Unclosed):
    async def log(self, step: int, metrics: Mapping[str, float]) -> None: ...  # type: ignore[override]

    def close(self) -> None: ...


class Lazy(Unclosed):
    """Its methods are not plain functions, so only a call shows whether they are right."""

    log = staticmethod(lambda step, metrics: None)  # type: ignore[assignment]
    close = staticmethod(lambda: None)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "own_loggers:Stepless",
            r"Stepless.log\(self, metrics.*cannot be called with \(self, step, metrics\): too many",
        ),
        ("own_loggers:Asking", r"Asking.close\(self, exit_code.*cannot be called with \(self\): missing"),
        ("own_loggers:Awaiting", r"Awaiting.log is async, and nothing awaits it. A logger is a class with __init__"),
        ("own_loggers:Unclosed", "'own_loggers:Unclosed' has no method close. A logger is a class with __init__"),
        ("own_loggers:Unaware", "'own_loggers:Unaware' is called with a LoggedRun: too many positional arguments"),
        ("own_loggers:Notd", "own_loggers has no 'Notd'"),
        ("own_loggers.py:Noted", "there is no file own_loggers.py. The"),
    ],
)
def test_a_mistake_in_a_logger_of_ones_own_is_found_by_all_ranks(
    tmp_path: Path, noted: str, name: str, message: str, rank: int
) -> None:
    module = sys.modules["own_loggers"]
    for kind in (Unclosed, Unaware, Stepless, Asking, Awaiting):
        setattr(module, kind.__name__, kind)
    with pytest.raises(LateMistakeError, match=message):
        Loggers(trainer_of(tmp_path, name, rank=rank))


def test_a_function_that_makes_a_logger_and_methods_that_are_no_functions_are_taken(tmp_path: Path, noted: str) -> None:
    module = sys.modules["own_loggers"]
    module.make, module.Lazy = lambda run: Noted(run), Lazy  # type: ignore[attr-defined]
    Loggers(trainer_of(tmp_path, "own_loggers:make,own_loggers:Lazy")).close()
    assert Noted.made[0].is_closed


@pytest.mark.parametrize("made", [None, SimpleNamespace(log=print)])
def test_a_function_that_makes_no_logger_is_refused_before_the_first_step(
    tmp_path: Path, noted: str, made: object
) -> None:
    sys.modules["own_loggers"].make = lambda run: made  # type: ignore[attr-defined]
    with pytest.raises(LateMistakeError, match=r"'own_loggers:make' returned .*, which has no log\(\) or no close\(\)"):
        Loggers(trainer_of(tmp_path, "own_loggers:make"))


def test_what_a_function_makes_must_not_be_async_either(tmp_path: Path, noted: str) -> None:
    sys.modules["own_loggers"].make = lambda run: Awaiting(run)  # type: ignore[attr-defined]
    with pytest.raises(LateMistakeError, match=r"Awaiting.log is async"):
        Loggers(trainer_of(tmp_path, "own_loggers:make"))


def test_other_ranks_have_none(tmp_path: Path, noted: str) -> None:
    loggers = Loggers(trainer_of(tmp_path, noted, rank=1))
    loggers.after_metrics(4, {"loss": 0.5})
    loggers.close()
    assert not Noted.made


def test_a_logger_whose_disk_is_full_ends_a_run_or_not(
    tmp_path: Path, noted: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(tmp_path / "file"))

    monkeypatch.setattr(Noted, "log", full)
    for name in ("config.yaml", "inputs.json", "owner.json"):  # of the start of the run
        (tmp_path / name).touch()
    with pytest.raises(OSError, match="No space left"):
        Loggers(trainer_of(tmp_path, noted)).after_metrics(4, {})
    Loggers(trainer_of(tmp_path, noted, on_disk_error="continue")).after_metrics(4, {})
    assert "a logger lacks the metrics of this step, and the run goes on" in capsys.readouterr().err


def test_a_run_whose_id_found_a_full_disk_gets_one_later(tmp_path: Path, noted: str) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))  # no file may grow
    try:
        with pytest.raises(OSError, match="too large"):
            Loggers(trainer_of(tmp_path, noted))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    Loggers(trainer_of(tmp_path, noted))
    assert len(Noted.made[0].run.id) == 8


def test_no_secret_leaves_the_run() -> None:
    config = GRPOConfig(judge=JudgeConfig(url="http://user:hunter2@localhost:1/v1", api_key_env="MY_KEY"))
    options = public_options(config)
    assert options["judge.url"] == "http://***@localhost:1/v1"
    assert options["judge.api_key_env"] == "MY_KEY"  # the name of a variable
    assert "hunter2" not in str(options)


def test_no_secret_leaves_the_run_in_a_list_of_arguments() -> None:
    given = ("hf_token=hunter2", "url=http://me:hunter2@localhost/", "max_tokens=8")
    options = public_options(GRPOConfig(engine_args=given, reward_args=("exact_match.api_key=hunter2",)))
    assert options["engine_args"] == ["hf_token=***", "url=http://***@localhost/", "max_tokens=8"]
    assert options["reward_args"] == ["exact_match.api_key=***"]


@pytest.mark.parametrize(
    ("name", "value", "wanted"),
    [
        ("hub.token", "hunter2", "***"),
        ("hub.token", "", ""),  # there is none
        ("mail_password", "hunter2", "***"),
        ("monkey", "see", "see"),  # only ends like a key
        ("engine_args", "api_key=", "api_key="),
        ("train_data", "http://localhost/me@home", "http://localhost/me@home"),  # no user
    ],
)
def test_only_what_may_be_a_secret_is_hidden(name: str, value: str, wanted: str) -> None:
    assert public(name, value) == wanted
