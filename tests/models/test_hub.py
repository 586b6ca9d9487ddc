import os
import socket
import threading
import time
from pathlib import Path

import pytest

from lightrl.models import hub
from lightrl.models.policy import check_model_folder


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")


def test_without_a_network_it_is_told_within_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub.constants, "ENDPOINT", "https://127.0.0.1:9")
    started = time.monotonic()
    with pytest.raises(ValueError, match=r"--model nobody/nothing is no folder .* 127.0.0.1 cannot be reached \(.*\)"):
        check_model_folder("nobody/nothing")
    assert time.monotonic() - started < 10
    monkeypatch.setattr(hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match="HF_HUB_OFFLINE is set"):
        check_model_folder("nobody/nothing")


def test_a_name_server_that_never_answers_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "_WAIT_S", 0.2)
    answered = threading.Event()

    def wait(*_: object, **__: object) -> None:
        answered.wait(30)
        raise OSError("too late")

    monkeypatch.setattr(socket, "create_connection", wait)
    with pytest.raises(ValueError, match=r"no answer within 0.2 s"):
        hub.require_reachable("nobody/nothing", "--model")
    answered.set()


@pytest.mark.parametrize(("endpoint", "port"), [("http://mirror.local", 80), ("https://mirror.local", 443)])
def test_an_endpoint_without_a_port_is_asked_at_that_of_its_scheme(
    endpoint: str, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub.constants, "ENDPOINT", endpoint)
    asked: list[tuple[str, int]] = []
    monkeypatch.setattr(socket, "create_connection", lambda address, timeout: asked.append(address) or socket.socket())
    hub.require_reachable("nobody/nothing", "--model")
    assert asked == [("mirror.local", port)]


def test_what_can_be_had_is_left_to_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, int]] = []
    connect = socket.create_connection

    def noted(address: tuple[str, int], timeout: float) -> socket.socket:
        asked.append(address)
        return connect(address, timeout)

    monkeypatch.setattr(socket, "create_connection", noted)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
        monkeypatch.setattr(hub.constants, "ENDPOINT", f"http://127.0.0.1:{address[1]}")
        hub.require_reachable("nobody/nothing", "--model")
    assert asked == [address]
    monkeypatch.setattr(hub.constants, "ENDPOINT", "https://127.0.0.1:9")
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy")  # which may reach it
    hub.require_reachable("nobody/nothing", "--model")
    assert asked == [address]  # nothing more


def test_without_a_network_a_cached_model_is_read_from_the_cache_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "try_to_load_from_cache", lambda *_: "/cache/config.json")
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setattr(hub.constants, "ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        hub.require_reachable("nobody/nothing", "--model")
    assert not hub.constants.HF_HUB_OFFLINE
    monkeypatch.setattr(hub.constants, "ENDPOINT", "https://127.0.0.1:9")
    hub.require_reachable("nobody/nothing", "--model")
    assert (hub.constants.HF_HUB_OFFLINE, os.environ["HF_HUB_OFFLINE"]) == (True, "1")
    started = time.monotonic()
    assert hub.file_of("nobody/nothing", "preprocessor_config.json") is None  # it would be asked for 23 s
    assert time.monotonic() - started < 5
    hub.require_reachable("nobody/nothing", "--model")


def test_a_file_is_sought_in_the_cache_alone_while_the_network_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked: list[bool] = []

    def noted(path: str, name: str, local_files_only: bool = False, **others: bool) -> str | None:
        asked.append(local_files_only)
        return library(path, name, local_files_only=local_files_only, **others) if local_files_only else "found"

    library = hub.cached_file
    monkeypatch.setattr(hub, "cached_file", noted)
    monkeypatch.setattr(hub.constants, "ENDPOINT", "https://127.0.0.1:9")
    assert hub.file_of("nobody/nothing", "preprocessor_config.json") is None
    assert "127.0.0.1 cannot be reached" in caplog.text
    assert "preprocessor_config.json of nobody/nothing comes from the cache, if at all" in caplog.text
    assert hub.file_of(str(tmp_path), "preprocessor_config.json") == "found"
    with socket.create_server(("127.0.0.1", 0)) as server:  # the network is back
        monkeypatch.setattr(hub.constants, "ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        assert hub.file_of("nobody/nothing", "preprocessor_config.json") == "found"
    assert asked == [True, False, False]
    assert not hub.constants.HF_HUB_OFFLINE


def test_a_folder_without_a_model_is_told_where_the_model_is(tmp_path: Path) -> None:
    def told(folder: Path) -> str:
        with pytest.raises(FileNotFoundError, match=r"holds no Hugging Face model\.") as error:
            check_model_folder(str(folder))
        return str(error.value)

    checkpoint = tmp_path / "checkpoints" / "step-000004"
    checkpoint.mkdir(parents=True)
    assert told(checkpoint).endswith(f" It is a checkpoint: lightrl export {tmp_path} --step 4 writes its model.")
    assert told(tmp_path).endswith("holds no Hugging Face model.")
    (tmp_path / "final").mkdir()
    (tmp_path / "final" / "config.json").touch()
    assert told(tmp_path).endswith(f" Did you mean {tmp_path / 'final'}?")
    (tmp_path / "adapter_config.json").touch()
    assert "It holds an adapter: give the model" in told(tmp_path)
