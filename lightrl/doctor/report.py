"""The program `lightrl doctor`: runs all checks and prints what they found."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta

from lightrl.comm import Comm, connect, pick_device
from lightrl.config import exit_with_user_error, option, parse_config, print_text, print_user_error
from lightrl.doctor.findings import Finding, findings_of
from lightrl.doctor.machine import check_devices, check_folders, check_limits, check_ports, check_sandbox
from lightrl.doctor.packages import check_packages, check_python
from lightrl.doctor.ranks import check_ranks

_APART = (
    "The ranks could not work together. Is MASTER_ADDR the address of the first machine, as the others reach it, and "
    "MASTER_PORT open? If a machine has several networks, name one by GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME."
)
_SIGNS = {"ok": "ok  ", "warning": "WARN", "fail": "FAIL"}


@dataclass(kw_only=True)
class DoctorConfig:
    """Check this machine, or under torchrun all ranks together, before a run.

    The exit code is 1 if a check failed, else 0. Warnings do not change it.
    """

    output_dir: str = ""
    """Folder that runs will be written to. Empty: runs/."""
    timeout_s: int = option(60, at_least=1)
    """Seconds that a rank waits for the others in a check."""
    json: bool = False
    """Print the findings as JSON."""


def main(arguments: Sequence[str]) -> int:
    """Runs the checks; rank 0 prints the findings of all machines, and every rank returns the same exit code."""
    config = parse_config(DoctorConfig, arguments, "lightrl doctor")
    try:
        device = pick_device("auto", int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
        comm = connect(device, timedelta(seconds=config.timeout_s))
        by_place = _collect(comm, config)
        comm.close()
    except ValueError as error:  # more ranks than GPUs
        exit_with_user_error(error)
    except (RuntimeError, OSError) as error:
        print_user_error(OSError(f"{error}\n{_APART}"))
        return 1
    if comm.is_main:
        print_text(_as_json(by_place) if config.json else _as_table(by_place))
    return int(any(finding.verdict == "fail" for _, findings in by_place for finding in findings))


def _collect(comm: Comm, config: DoctorConfig) -> list[tuple[str, list[Finding]]]:
    """Returns the findings by machine, followed by those of all ranks together."""

    def check_own_folders() -> Iterator[Finding]:
        return check_folders(config.output_dir)

    checks = [check_python, check_packages, check_devices, check_limits, check_ports, check_own_folders, check_sandbox]
    is_first_here = os.environ.get("LOCAL_RANK", "0") == "0"  # the other ranks of a machine would find the same
    own = list(findings_of(checks)) if is_first_here else []
    found = comm.all_gather_object((socket.gethostname(), own))
    by_place = [(host, findings) for host, findings in found if findings]
    if comm.world == 1:
        return by_place
    return [*by_place, (f"all {comm.world} ranks together", list(check_ranks(comm, config.output_dir)))]


def _as_table(by_place: Sequence[tuple[str, Sequence[Finding]]]) -> str:
    lines = []
    for place, findings in by_place:
        lines.append(f"{place}:")
        for finding in findings:
            lines.append(f"  {_SIGNS[finding.verdict]} {finding.check}: {finding.found}")
            if finding.remedy:
                lines.append(f"       -> {finding.remedy}")
    everything = [finding for _, findings in by_place for finding in findings]
    failed, warned = (sum(finding.verdict == verdict for finding in everything) for verdict in ("fail", "warning"))
    lines.append(f"{len(everything)} checks: {failed} failed, {warned} warned")
    return "\n".join(lines)


def _as_json(by_place: Sequence[tuple[str, Sequence[Finding]]]) -> str:
    table = [{"where": place, "findings": [finding._asdict() for finding in findings]} for place, findings in by_place]
    return json.dumps(table, indent=2)
