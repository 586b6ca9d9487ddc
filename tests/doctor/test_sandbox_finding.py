"""What is said of the sandbox for programs of responses."""

import pytest

from lightrl.doctor import sandbox
from lightrl.rewards.sandbox import SandboxUnavailableError


def refuse() -> str:
    raise SandboxUnavailableError("This system allows no sandbox. Install bubblewrap.")


@pytest.mark.parametrize(
    ("confinement", "is_hidden", "verdict"),
    [("bubblewrap", False, "ok"), ("bubblewrap", True, "warning"), ("landlock", True, "ok")],
)
def test_the_confinement(confinement: str, is_hidden: bool, verdict: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "choose_confinement", lambda: confinement)
    monkeypatch.setattr(sandbox, "hides_packages", lambda: is_hidden)
    (found,) = sandbox.check_sandbox()
    assert (found.verdict, found.found) == (verdict, f"--reward code runs programs by {confinement}")


def test_no_sandbox_is_a_warning_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "choose_confinement", refuse)
    (found,) = sandbox.check_sandbox()
    assert (found.verdict, found.remedy) == ("warning", "This system allows no sandbox. Install bubblewrap.")
