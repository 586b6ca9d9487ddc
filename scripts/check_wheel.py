"""Fails unless a wheel contains every file of the package and nothing else.

Usage: python scripts/check_wheel.py dist/*.whl
"""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / "lightrl"
DATA_FILES = (
    "py.typed",
    "engines/native/kernels.c",
    "engines/native/amx.c",
    "engines/native/amx_split.c",
    "engines/native/tiles.h",
    "engines/weights/row_sums.c",
    "report/page.html",
    "report/page.css",
    "report/page.js",
)


def source_files(package: Path) -> set[str]:
    """Returns every module and data file under the name that it has in a wheel, such as lightrl/strategy/fsdp.py."""
    files = [*package.rglob("*.py"), *(package / name for name in DATA_FILES if (package / name).is_file())]
    return {path.relative_to(package.parent).as_posix() for path in files}


def wheel_files(wheel: Path) -> set[str]:
    """Returns the files of a wheel without its metadata."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    return {name for name in names if not name.endswith("/") and not name.split("/")[0].endswith(".dist-info")}


def problems(wheel: Path, package: Path = PACKAGE) -> list[str]:
    """Returns one line for each missing or unexpected file."""
    expected, actual = source_files(package), wheel_files(wheel)
    folders = sorted({str(Path(name).parent) for name in expected} - {str(Path(name).parent) for name in actual})
    lines = [f"sub-package {folder} is absent" for folder in folders]
    lines += [f"{name} is absent" for name in sorted(expected - actual) if str(Path(name).parent) not in folders]
    return lines + [f"{name} is in the wheel but not in the source" for name in sorted(actual - expected)]


def main(wheels: list[str]) -> int:
    """Checks the one wheel that is given and returns the exit code."""
    if len(wheels) != 1:
        print(f"Give exactly one wheel; {len(wheels)} were given.", file=sys.stderr)
        return 2
    wheel = Path(wheels[0])
    lines = problems(wheel)
    for line in lines:
        print(f"{wheel.name}: {line}", file=sys.stderr)
    if lines:
        return 1
    files = wheel_files(wheel)
    for folder in sorted({str(Path(name).parent) for name in files}):
        print(f"{folder}: {sum(str(Path(name).parent) == folder for name in files)} files")
    print(f"{wheel.name} contains the whole package.")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
