"""A C file is compiled for this machine, and what goes wrong is said in a sentence."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightrl.c_library import compiled, find_compiler


def has_compiler() -> bool:
    try:
        return bool(find_compiler())
    except RuntimeError:
        return False


pytestmark = pytest.mark.skipif(not has_compiler(), reason="needs a C compiler")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "sum.c"
    path.write_text("int sum(int a) { return a + ADDED; }\n")
    return path


def test_macros_are_defined_and_no_file_is_left(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(scratch))
    assert [compiled(source, {"ADDED": added}).sum(40) for added in (2, 3)] == [42, 43]
    assert list(scratch.iterdir()) == []


def test_what_the_compiler_says_is_shown(source: Path) -> None:
    with pytest.raises(RuntimeError, match=r"(?s)failed with exit code 1; set CC to another compiler:\n.*ADDED"):
        compiled(source, {})


def test_a_compiler_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "no-such-compiler -m64")
    with pytest.raises(RuntimeError, match="CC is 'no-such-compiler -m64', which is not on the path"):
        find_compiler()
    monkeypatch.setenv("CC", "'gcc")
    with pytest.raises(RuntimeError, match="which is no command: No closing quotation"):
        find_compiler()
    monkeypatch.delenv("CC")
    monkeypatch.setenv("PATH", "")
    with pytest.raises(RuntimeError, match="gcc, clang and cc are missing. Install gcc, or set CC"):
        find_compiler()


def test_cc_is_a_command_with_options(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = find_compiler()[0]
    monkeypatch.setenv("CC", f"{compiler} -DADDED=5")
    assert find_compiler() == [compiler, "-DADDED=5"]
    assert compiled(source, {}).sum(1) == 6


def test_a_compiler_without_openmp_compiles_for_one_thread(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    compiler = tmp_path / "cc-without-openmp"
    refusing = f'case "$*" in *-fopenmp*) exit 1;; esac; exec {find_compiler()[0]} "$@"'
    compiler.write_text(f"#!/bin/sh\n{refusing}\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    assert compiled(source, {"ADDED": 2}).sum(1) == 3
    assert "The kernels use one thread: " in caplog.text
    assert "-fopenmp" in caplog.text
