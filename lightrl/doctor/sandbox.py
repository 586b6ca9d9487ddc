"""Checks whether the reward `code` can run the programs of responses here."""

from __future__ import annotations

from collections.abc import Iterator

from lightrl.doctor.findings import Finding, judged
from lightrl.rewards.sandbox import SandboxUnavailableError, choose_confinement, hides_packages


def check_sandbox() -> Iterator[Finding]:
    """Yields a finding that says how programs are confined, or why they cannot be."""
    try:
        confinement = choose_confinement()
    except SandboxUnavailableError as error:
        yield Finding("sandbox", "warning", "none works, so --reward code is refused", str(error))
        return
    yield judged(
        "sandbox",
        f"--reward code runs programs by {confinement}",
        warns=confinement != "landlock" and hides_packages(),
        remedy="Programs cannot import installed packages, since these are in /tmp: make the environment elsewhere.",
    )
