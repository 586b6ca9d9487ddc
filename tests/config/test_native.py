"""--native.cpu_kernels is refused with what cannot use the kernels."""

from __future__ import annotations

from typing import Any

import pytest

from lightrl.config import GRPOConfig
from lightrl.config.native import NativeEngineConfig
from lightrl.config.strategy import RoutingConfig


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"engine": "vllm"}, "engine vllm"),
        ({"exact": True}, "exact"),
        ({"native": NativeEngineConfig(cpu_kernels=True, lookup=3)}, "native.lookup"),
        ({"routing": RoutingConfig(replay=True)}, "routing.replay"),
    ],
)
def test_what_it_does_not_go_with_is_refused(options: dict[str, Any], name: str) -> None:
    with pytest.raises(ValueError, match=f"--native.cpu_kernels does not go with --{name}: "):
        GRPOConfig(**{"native": NativeEngineConfig(cpu_kernels=True), **options})


def test_a_missing_compiler_is_noticed_before_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    with pytest.raises(ValueError, match="--native.cpu_kernels True: A C compiler is needed: CC is 'no-such-compiler'"):
        GRPOConfig(native=NativeEngineConfig(cpu_kernels=True))
    assert GRPOConfig().native == NativeEngineConfig()
