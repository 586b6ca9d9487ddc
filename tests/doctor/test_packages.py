"""Versions that do not fit together are named, with what to install."""

from importlib import metadata

import pytest

from lightrl.doctor.packages import check_packages, check_python


def install(monkeypatch: pytest.MonkeyPatch, packages: dict[str, tuple[str, list[str]]]) -> None:
    """Pretends that these packages, each with version and requirements, are the installed ones."""

    def version(name: str) -> str:
        if name not in packages:
            raise metadata.PackageNotFoundError(name)
        return packages[name][0]

    monkeypatch.setattr(metadata, "version", version)
    monkeypatch.setattr(metadata, "requires", lambda name: packages[name][1])


CORE: dict[str, tuple[str, list[str]]] = {
    "lightrl": ("1.0", ["torch>=2.8", 'deepspeed>=0.19.8; extra == "deepspeed"', "numpy>=1.24"]),
    "torch": ("2.13.0+cpu", []),
    "transformers": ("5.19.0", ["safetensors>=0.4.3", 'torch>=2.4; extra == "torch"', "not a requirement"]),
    "safetensors": ("0.8.0", []),
    "numpy": ("2.3.5", []),
}


def test_what_is_installed_here_fits() -> None:
    assert {finding.verdict for finding in [*check_packages(), *check_python()]} == {"ok"}


def test_a_fitting_set_is_one_line_of_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, CORE)
    (only,) = check_packages()
    assert only.verdict == "ok"
    assert "torch 2.13.0+cpu, transformers 5.19.0" in only.found


def test_another_torch_than_an_engine_needs_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, CORE | {"vllm": ("0.32.0", ["torch==2.10.0", "flash_attn>=9; extra == 'x'"])})
    _, finding = check_packages()
    assert finding.verdict == "fail"
    assert finding.found == "vllm 0.32.0 needs torch==2.10.0, and 2.13.0+cpu is installed"
    assert 'pip install "torch==2.10.0"' in finding.remedy


def test_an_optional_package_of_the_wrong_version_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, CORE | {"deepspeed": ("0.18.0", [])})
    _, finding = check_packages()
    assert finding.verdict == "warning"
    assert finding.found == "lightrl 1.0 needs deepspeed>=0.19.8, and 0.18.0 is installed"


def test_an_optional_package_is_checked_whatever_its_extra_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = [*CORE["lightrl"][1], 'peft>=0.18; extra == "lora"', 'numpy>=9; extra == "datasets"']
    install(monkeypatch, CORE | {"lightrl": ("1.0", asked), "peft": ("0.10.0", [])})
    _, finding = check_packages()
    assert finding.found == "lightrl 1.0 needs peft>=0.18, and 0.10.0 is installed"


def test_a_missing_package_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, {name: value for name, value in CORE.items() if name != "safetensors"})
    _, finding = check_packages()
    assert (finding.verdict, finding.found) == ("fail", "not installed: safetensors")
