"""The tree is what the documents say: tests mirror the package, links lead somewhere, nothing names one machine."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "lightrl"
COVERED_BY = {  # what only means something as a whole, on real ranks, is started once for several modules
    "__main__.py": "test_programs.py",
    "doctor/__main__.py": "doctor/test_ranks.py",
    "parcels.py": "test_comm.py",
    "train.py": "test_programs.py",
    "engines/sglang/adapted.py": "engines/real_sglang/test_sglang_adapted.py",
    "engines/sglang/adapted_loader.py": "engines/sglang/test_sglang_pool.py",
    "engines/sglang/engine.py": "engines/real_sglang/test_sglang_engine.py",
    "engines/sglang/sync.py": "engines/real_sglang/test_sglang_engine.py",
    "engines/vllm/build.py": "engines/vllm/test_vllm_engine.py",
    "exact/policy.py": "exact/test_exact_engine.py",
    "rewards/sandboxed/data.py": "rewards/sandboxed/test_checker.py",
    "rewards/sandboxed/errors.py": "rewards/sandboxed/test_checker.py",
    "rewards/sandboxed/namespaces.py": "rewards/sandboxed/test_launcher.py",
    "rewards/sandboxed/peer.py": "rewards/sandboxed/test_checker.py",
    "rewards/sandboxed/program.py": "rewards/sandboxed/test_checker.py",
    "rewards/sandboxed/remote.py": "rewards/sandboxed/test_checker.py",
    "rewards/sandboxed/restrictions.py": "rewards/sandboxed/test_launcher.py",
    "strategy/base.py": "strategy/test_contract.py",
    "strategy/foreign_models.py": "strategy/test_public_contract.py",
    "strategy/optim/hooks.py": "strategy/test_contract.py",
    "strategy/optim/hooked_step.py": "strategy/optim/test_accumulation.py",
    "strategy/optim/parameter_kinds.py": "strategy/optim/test_optimizers.py",
    "strategy/results.py": "strategy/test_contract.py",
    "strategy/layout/adapters.py": "strategy/test_lora_training.py",
    "strategy/saving/state_reader.py": "strategy/saving/test_state_files.py",
    "strategy/torch_native.py": "strategy/test_contract.py",
    "trainers/earlier_run.py": "trainers/test_run_folder.py",
    "testing/skipped_updates.py": "strategy/test_single_strategy.py",
    "strategy/megatron/layout.py": "strategy/megatron/test_megatron_strategy.py",
    "strategy/megatron/modules.py": "strategy/megatron/test_megatron_strategy.py",
    "strategy/megatron/placing.py": "strategy/megatron/test_megatron_strategy.py",
    "strategy/megatron/ranks.py": "strategy/megatron/test_megatron_strategy.py",
    "strategy/megatron/schedule.py": "strategy/megatron/test_megatron_strategy.py",
    "strategy/megatron/stage.py": "strategy/megatron/test_megatron_strategy.py",
    "strategy/megatron/updates.py": "strategy/megatron/test_megatron_strategy.py",
    "strategy/megatron/vocabulary.py": "strategy/megatron/test_megatron_strategy.py",
    "testing/strategy_checks.py": "strategy/test_single_strategy.py",
    "testing/strategy_contract.py": "strategy/test_single_strategy.py",
    "testing/strategy_parity.py": "strategy/test_single_strategy.py",
    "testing/strategy_program.py": "strategy/test_single_strategy.py",
    "testing/tiny_training.py": "strategy/test_single_strategy.py",
}
TEXT_SUFFIXES = {"", ".cfg", ".json", ".md", ".py", ".sbatch", ".sh", ".toml", ".txt", ".yaml", ".yml"}
# A home or mount as it stands on somebody's machine. /tmp, /usr, /etc and /proc are the same everywhere.
MACHINE_PATH = re.compile(r"(?<![\w./~}$>-])/(?:home|root|Users|work|opt|mnt|scratch)/\w+")
LINK = re.compile(r"\]\((?!https?://|#|mailto:)([^)#\s]+)")


def tracked_files() -> list[Path]:
    """All text files that git knows or would add; without git, all that are not hidden or built."""
    command = ["git", "-C", str(ROOT), "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    if found.returncode == 0:
        paths = [ROOT / name for name in found.stdout.split("\0") if name]
    else:
        built = {"build", "dist", "runs", "__pycache__"}
        paths = [
            path
            for path in ROOT.rglob("*")
            if not any(part in built or (part[0] == "." and part != ".ci") for part in path.relative_to(ROOT).parts)
        ]
    return sorted(path for path in paths if path.is_file() and path.suffix in TEXT_SUFFIXES)


def own_tests(module: Path) -> list[Path]:
    name = module.relative_to(PACKAGE)
    return list((ROOT / "tests" / name.parent).glob(f"test_*{module.stem}*.py"))


def test_every_module_has_a_test_file() -> None:
    modules = [path for path in sorted(PACKAGE.rglob("*.py")) if path.name != "__init__.py"]
    untested = [path.relative_to(PACKAGE).as_posix() for path in modules if not own_tests(path)]
    assert [name for name in untested if name not in COVERED_BY] == []


@pytest.mark.parametrize(("module", "test"), COVERED_BY.items())
def test_every_exception_is_needed_and_true(module: str, test: str) -> None:
    assert (PACKAGE / module).is_file()
    assert (ROOT / "tests" / test).is_file()
    assert not own_tests(PACKAGE / module)


def test_test_file_names_are_unique() -> None:
    """Without packages under tests/, pytest cannot tell two files of one name apart."""
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert sorted({name for name in names if names.count(name) > 1}) == []


def test_every_folder_of_the_package_is_a_package() -> None:
    folders = {path.parent for path in PACKAGE.rglob("*.py")}
    assert [str(folder) for folder in sorted(folders) if not (folder / "__init__.py").is_file()] == []


@pytest.mark.parametrize("name", ["utils", "common", "helpers", "misc"])
def test_no_module_is_named_after_nothing(name: str) -> None:
    assert [str(path) for path in PACKAGE.rglob(f"{name}*")] == []


def test_no_file_names_a_place_on_one_machine() -> None:
    found = []
    for path in tracked_files():
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            found += [f"{path.relative_to(ROOT)}:{number}: {match}" for match in MACHINE_PATH.findall(line)]
    assert found == []


def test_the_machine_path_pattern_finds_them() -> None:
    text = "see {0}home/ann/model, `{0}root/x`; not https://a.org/home/b, runs/work/c or /tmp/d".format("/")
    assert MACHINE_PATH.findall(text) == ["/" + "home/ann", "/" + "root/x"]


def test_python_sources_are_ascii() -> None:
    found = [path for path in tracked_files() if path.suffix == ".py" and not path.read_bytes().isascii()]
    assert [str(path.relative_to(ROOT)) for path in found] == []


def test_links_in_the_documents_lead_somewhere() -> None:
    broken = []
    for path in tracked_files():
        if path.suffix == ".md":
            targets = LINK.findall(path.read_text(encoding="utf-8"))
            broken += [f"{path.relative_to(ROOT)}: {link}" for link in targets if not (path.parent / link).exists()]
    assert broken == []


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) < 200
