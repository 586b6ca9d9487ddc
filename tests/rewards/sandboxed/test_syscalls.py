"""The filter as the kernel reads it, on both architectures, and its numbers against the kernel's own headers."""

from __future__ import annotations

import re
import struct
from pathlib import Path

import pytest

from lightrl.rewards.sandboxed import syscalls
from lightrl.rewards.sandboxed.syscalls import filter_code

AUDIT = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
ALLOWED, DENIED, UNKNOWN, KILLED = 0x7FFF0000, 0x00050001, 0x00050026, 0x80000000


def verdict(machine: str, number: int, *args: int, files: bool = True, audit: int | None = None) -> int:
    """Runs the filter on one system call."""
    code = filter_code(machine, may_change_files=files)
    data = struct.pack("=IIQ6Q", number, AUDIT[machine] if audit is None else audit, 0, *args, *[0] * (6 - len(args)))
    position = value = 0
    while True:
        operation, if_true, if_false, operand = struct.unpack_from("=HBBI", code, 8 * position)
        position += 1
        if operation == 0x20:
            (value,) = struct.unpack_from("=I", data, operand)
        elif operation == 0x06:
            return int(operand)
        else:
            is_true = {0x15: value == operand, 0x45: bool(value & operand), 0x35: value >= operand}[operation]
            position += if_true if is_true else if_false


@pytest.mark.parametrize(
    ("machine", "read", "openat", "mkdirat", "clone", "prlimit", "denied"),
    [
        ("x86_64", 0, 257, 258, 56, 302, (57, 58, 59, 41, 62, 101, 272, 319, 321, 0x40000000)),  # fork ... memfd, bpf
        ("aarch64", 63, 56, 34, 220, 261, (221, 198, 129, 117, 97, 279, 280, 1038)),
    ],
)
def test_what_is_allowed_and_what_not(
    machine: str, read: int, openat: int, mkdirat: int, clone: int, prlimit: int, denied: tuple[int, ...]
) -> None:
    assert verdict(machine, read) == ALLOWED
    assert verdict(machine, read, audit=0x40000003) == KILLED  # a call in the manner of i386
    assert {verdict(machine, number) for number in denied} == {DENIED}
    assert verdict(machine, 435) == UNKNOWN
    assert (verdict(machine, clone, 0x3D0F00), verdict(machine, clone, 17)) == (ALLOWED, DENIED)  # thread, process
    assert (verdict(machine, prlimit, 0), verdict(machine, prlimit, 1)) == (ALLOWED, DENIED)
    assert (verdict(machine, mkdirat), verdict(machine, mkdirat, files=False)) == (ALLOWED, DENIED)
    for flags, without in (
        (0, ALLOWED),
        (0o2000000, ALLOWED),
        (1, DENIED),
        (2, DENIED),
        (0o100, DENIED),
        (512, DENIED),
    ):
        assert verdict(machine, openat, 0, 0, flags) == ALLOWED
        assert verdict(machine, openat, 0, 0, flags, files=False) == without


@pytest.mark.parametrize(("machine", "column"), [("x86_64", 0), ("aarch64", 1)])
@pytest.mark.parametrize(
    ("name", "args", "allowed", "denied"),
    [
        ("ioctl", (0,), 0x5413, 0x5412),  # the size of a terminal; typing into it
        ("fcntl", (0,), 1, 8),  # a close-on-exec flag; whom signals go to
        ("fcntl", (0,), 7, 10),  # a lock; which signal
        ("prctl", (), 15, 4),  # a name; whether its memory is open to others
        ("socketpair", (), 1, 2),  # of this machine; of the internet
    ],
)
def test_some_calls_are_allowed_for_harmless_uses(
    machine: str, column: int, name: str, args: tuple[int, ...], allowed: int, denied: int
) -> None:
    number: int = syscalls._CHECKED[name][column]  # type: ignore[assignment]
    assert (verdict(machine, number, *args, allowed), verdict(machine, number, *args, denied)) == (ALLOWED, DENIED)


def test_another_architecture_has_no_filter() -> None:
    with pytest.raises(OSError, match="no seccomp filter for s390x"):
        filter_code("s390x", may_change_files=True)


@pytest.mark.parametrize(
    ("header", "column"),
    [("/usr/include/x86_64-linux-gnu/asm/unistd_64.h", 1), ("/usr/include/asm-generic/unistd.h", 2)],
)
def test_the_numbers_are_the_kernels(header: str, column: int) -> None:
    if not Path(header).exists():
        pytest.skip(f"{header} is not installed")
    text = re.sub("__NR3264_fstatat", "__NR_newfstatat", Path(header).read_text()).replace("__NR3264_", "__NR_")
    numbers = dict(re.findall(r"#define __NR_(\w+) (\d+)\n", text))
    table = f"{syscalls._NAMES_X86_64_AARCH64},{syscalls._CHANGING_FILES_X86_64_AARCH64}"
    rows = [row.split() for row in table.replace("\n", " ").split(",")]
    assert [row for row in rows if row[column] != numbers.get(row[0], "-")] == []
    checked = {**syscalls._CHECKED, **syscalls._READING_FILES, "clone": syscalls._CLONE, "clone3": syscalls._CLONE3}
    for name, row in checked.items():
        assert str(row[column - 1]) == numbers.get(name, "-1"), name
