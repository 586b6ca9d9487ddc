"""The documents: the site builds without a warning, and every file that a page names exists."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from pkgutil import resolve_name
from types import ModuleType

import pytest
from loaded_file import load_file

from lightrl.config import DPOConfig, GRPOConfig, PPOConfig, RMConfig, SFTConfig
from lightrl.config.options import option_names
from lightrl.testing import run_program

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "AGENTS.md")]
PAGES += [page for page in sorted((ROOT / "docs").rglob("*.md")) if page.name != "log.md"]  # the log names what was
NAMED_FILE = re.compile(r"(?<![\w./:~-])((?:\w+/)+\w+\.(?:py|sh|sbatch|md|yaml))\b")
EXAMPLES = {"path/to/file.py", "lightrl/x/y.py", "tests/x/test_y.py"}


@pytest.fixture(scope="module")
def docs_links() -> ModuleType:
    return load_file(ROOT / "scripts" / "docs_links.py")


def exists(name: str, page: Path) -> bool:
    return any((folder / name).is_file() for folder in (ROOT, ROOT / "lightrl", ROOT / "tests", page.parent))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_file_that_a_page_names_exists(page: Path) -> None:
    named = set(NAMED_FILE.findall(re.sub(r"\]\([^)]*\)|https?://\S+", "]", page.read_text()))) - EXAMPLES
    assert [name for name in sorted(named) if not exists(name, page)] == []


def test_every_page_is_in_the_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text()
    pages = [page.relative_to(ROOT / "docs").as_posix() for page in (ROOT / "docs").rglob("*.md")]
    assert [page for page in sorted(pages) if f" {page}\n" not in navigation] == []


def test_options_in_place_of_those_of_other_trainers_exist() -> None:
    rows = re.findall(r"^\| (?!---).+ \| (.+) \|$", (ROOT / "docs" / "coming_from.md").read_text(), re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"--([a-z_.]+)", row)}
    assert len(named) > 50
    kinds = (GRPOConfig, PPOConfig, SFTConfig, RMConfig, DPOConfig)
    assert sorted(named - {option for kind in kinds for option in option_names(kind)}) == []


def test_every_package_has_a_reference() -> None:
    folders = [path.parent.name for path in (ROOT / "lightrl").glob("*/__init__.py")]
    modules = [path.stem for path in (ROOT / "lightrl").glob("*.py") if path.stem != "__init__"]
    reference = "".join(page.read_text() for page in (ROOT / "docs" / "reference").glob("*.md"))
    assert [name for name in sorted([*folders, *modules]) if f"::: lightrl.{name}\n" not in reference] == []


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("see [configs/](../configs) here", "see `configs` here"),
        ("[grpo](../configs/grpo.yaml)", "`configs/grpo.yaml`"),
        ("[its contract](../lightrl/engines/base.py)", "its contract (`lightrl/engines/base.py`)"),
        ("[engines](engines.md), [site](https://a.org/../b)", "[engines](engines.md), [site](https://a.org/../b)"),
    ],
)
def test_links_out_of_the_site_read_as_paths(docs_links: ModuleType, text: str, shown: str) -> None:
    assert docs_links.outside_links_as_paths(text) == shown


@pytest.mark.slow
@pytest.mark.long
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("mkdocstrings", reason="the docs extra is not installed")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    run_program(command, timeout_s=240, cwd=ROOT)
    assert "StrategyBase" in (tmp_path / "site" / "reference" / "strategy" / "index.html").read_text()


def test_the_way_through_a_plain_run_names_functions_that_there_are() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    rows = re.findall(r"^\| [^|]+ \| `([\w.]+)` \| `(lightrl/[\w/]+\.py)` \|$", page, re.MULTILINE)
    assert len(rows) > 15
    for name, file in rows:
        module = file.removesuffix(".py").replace("/", ".")
        assert callable(resolve_name(f"{module}:{name}"))
