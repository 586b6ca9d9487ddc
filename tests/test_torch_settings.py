"""Settings of torch that a user's code changes and leaves."""

from collections.abc import Callable

import pytest
import torch

from lightrl.torch_settings import settings_kept

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
