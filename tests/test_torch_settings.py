"""Settings of torch that a user's code changes and leaves."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from lightrl.rewards import load_reward
from lightrl.torch_settings import ChangedByImportError, settings_kept

CHANGES: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
    r"torch.is_grad_enabled\(\) from True to False": (
        lambda: torch.set_grad_enabled(False),
        lambda: torch.set_grad_enabled(True),
    ),
    r"torch.get_default_dtype\(\) from torch.float32 to torch.float16": (
        lambda: torch.set_default_dtype(torch.float16),
        lambda: torch.set_default_dtype(torch.float32),
    ),
    r"torch.get_default_device\(\) from cpu to meta": (
        lambda: torch.set_default_device("meta"),
        lambda: torch.set_default_device(None),
    ),
    r"torch.is_autocast_enabled\('cpu'\) from False to True": (
        lambda: torch.set_autocast_enabled("cpu", True),
        lambda: torch.set_autocast_enabled("cpu", False),
    ),
    "torch.backends.mkldnn.matmul.fp32_precision from .* to bf16": (
        lambda: torch.set_float32_matmul_precision("medium"),
        lambda: torch.set_float32_matmul_precision("highest"),
    ),
}


@pytest.mark.parametrize("told", CHANGES)
def test_a_setting_that_is_left_changed_is_named(told: str) -> None:
    change, undo = CHANGES[told]
    wanted = f"The reward 'mine' has changed .*: .*{told}. It must set them back"
    try:
        with pytest.raises(RuntimeError, match=wanted), settings_kept("The reward 'mine'"):
            change()
    finally:
        undo()


def test_inference_mode_that_is_left_on_is_named() -> None:
    mode = torch.inference_mode()
    told = r"is_grad_enabled\(\) from True to False, torch.is_inference_mode_enabled\(\) from False to True"
    with pytest.raises(RuntimeError, match=told), settings_kept("The reward 'mine'"):
        mode.__enter__()
    mode.__exit__(None, None, None)


def test_what_is_set_back_is_allowed_and_an_error_passes() -> None:
    with settings_kept("The reward 'mine'"), torch.no_grad(), torch.device("meta"):
        torch.ones(1)
    with pytest.raises(KeyError), settings_kept("The reward 'mine'"):
        raise KeyError("of the body")
    assert torch.is_grad_enabled()


@pytest.mark.parametrize(
    ("line", "undo"),
    [
        ("torch.set_default_dtype(torch.float64)", lambda: torch.set_default_dtype(torch.float32)),
        ("torch.set_default_device('meta')", lambda: torch.set_default_device(None)),
        ("torch.set_grad_enabled(False)", lambda: torch.set_grad_enabled(True)),
    ],
)
def test_a_module_that_changes_settings_when_it_is_imported_is_named(
    line: str, undo: Callable[[], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    name = f"careless_{abs(hash(line))}"
    (tmp_path / f"{name}.py").write_text(f"import torch\n{line}\ndef mine(sample): return 1.0\n")
    for reward, module in ((f"{name}:mine", name), (f"{tmp_path / name}.py:mine", f"{tmp_path / name}.py")):
        try:
            with pytest.raises(ChangedByImportError, match=f"The import of {module} has changed settings of torch"):
                load_reward(reward)
        finally:
            undo()


def test_a_module_may_choose_the_precision_of_products(tmp_path: Path) -> None:
    (tmp_path / "fast.py").write_text(
        "import torch\ntorch.set_float32_matmul_precision('high')\ndef mine(sample): return 1.0\n"
    )
    try:
        assert callable(load_reward(f"{tmp_path / 'fast.py'}:mine"))
    finally:
        torch.set_float32_matmul_precision("highest")
