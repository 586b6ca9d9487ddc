"""The three texts of --help: short, about a topic, whole."""

import re
from dataclasses import dataclass
from typing import Any, Literal

import pytest

from lightrl.algorithms.registry import BUILTIN as ALGORITHMS
from lightrl.config import (
    DPOConfig,
    EvaluateConfig,
    GRPOConfig,
    PPOConfig,
    RMConfig,
    SFTConfig,
    option,
    parse_config,
    section,
)
from lightrl.config.help import help_on, short_help, whole_help
from lightrl.data.curriculum import BUILTIN_CURRICULA
from lightrl.engines.base import BUILTIN_ENGINES
from lightrl.rewards.reward_set import BUILTIN_REWARDS
from lightrl.rollout.workflow import BUILTIN_WORKFLOWS
from lightrl.strategy.base import BUILTIN_STRATEGIES
from lightrl.trainers.scheduled import BUILTIN_FILTERS


@dataclass(kw_only=True)
class Inner:
    """How it is shared.

    A second paragraph.
    """

    share: float = option(0.5, at_least=0, at_most=1)
    """A share. It has a second sentence."""
    from_: str = ""
    """Where it comes from."""


@dataclass(kw_only=True)
class Outer:
    """A config."""

    width: int = option(1, at_least=1)
    """A width that has no meaning at all, and a text that is
    so long that it needs two lines of source. Then it says more."""
    kind: Literal["a", "b"] = "a"
    """A kind."""
    bound: float | None = None
    """A bound."""
    names: tuple[str, ...] = ("x", "y")
    """Names."""
    pair: tuple[float, float] = (0.5, 1.0)
    """Two numbers."""
    on: bool = False
    """Whether it is on."""
    inner: Inner = section(Inner)


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "110")


def test_the_short_help_has_a_line_for_each_option_and_each_section() -> None:
    assert short_help(Outer, "run.py").splitlines() == [
        "usage: run.py [OPTIONS]",
        "",
        "A config.",
        "",
        "options, each with its default:",
        "  --width 1                             A width that has no meaning at all, and a text that is so long ...",
        "  --kind a                              A kind.",
        "  --bound None                          A bound.",
        "  --names x y                           Names.",
        "  --pair 0.5 1.0                        Two numbers.",
        "  --on False                            Whether it is on.",
        "",
        "sections, each with the number of its options:",
        "  --inner.* (2)                         How it is shared.",
        "",
        "run.py --help SECTION explains the options of a section, --help WORD those that name WORD, and",
        "--help-all every option. --config FILE reads options from YAML; a flag overrides the file.",
    ]


def test_the_short_help_without_sections_names_none() -> None:
    assert short_help(Inner, "run.py").splitlines()[-5:] == [
        "  --share 0.5                           A share.",
        "  --from ''                             Where it comes from.",
        "",
        "run.py --help WORD explains the options that name WORD, and",
        "--help-all every option. --config FILE reads options from YAML; a flag overrides the file.",
    ]


@pytest.mark.parametrize(
    ("config", "flag", "names"),
    [
        (GRPOConfig, "reward", BUILTIN_REWARDS),
        (GRPOConfig, "rollout.workflow", BUILTIN_WORKFLOWS),
        (GRPOConfig, "rollout.filter", BUILTIN_FILTERS),
        (GRPOConfig, "data.curriculum", BUILTIN_CURRICULA),
        (GRPOConfig, "strategy", BUILTIN_STRATEGIES),
        (GRPOConfig, "engine", BUILTIN_ENGINES),
        *((GRPOConfig, f"algorithm.{kind}", names) for kind, names in ALGORITHMS.items() if kind != "returns"),
        (PPOConfig, "algorithm.advantage", ALGORITHMS["returns"]),
    ],
)
def test_the_help_names_every_built_in(config: type[Any], flag: str, names: dict[str, str]) -> None:
    words = set(re.findall(r"\w+", help_on(config, flag).partition("\n--")[0]))
    assert sorted(set(names) - words) == []


@pytest.mark.parametrize("config", [GRPOConfig, PPOConfig, SFTConfig, RMConfig, DPOConfig, EvaluateConfig])
def test_no_line_of_the_short_help_is_cut(config: type[Any]) -> None:
    assert [line for line in short_help(config, "run.py").splitlines() if line.endswith(" ...")] == []


def test_a_topic_is_a_section_or_an_option_or_a_part_of_names() -> None:
    inner = help_on(Outer, "inner")
    assert inner.splitlines() == [
        "--inner.share FLOAT",
        "    A share. It has a second sentence. (default: 0.5)",
        "--inner.from STR",
        "    Where it comes from. (default: '')",
    ]
    assert help_on(Outer, "--inner.*") == inner
    assert help_on(Outer, "inner.from").startswith("--inner.from STR\n")
    assert [line for line in help_on(Outer, "n").splitlines() if line[0] == "-"] == [
        "--kind {a,b}",
        "--bound FLOAT|None",
        "--names [STR ...]",
        "--on {True,False}",
        "--inner.share FLOAT",
        "--inner.from STR",
    ]
    assert help_on(Outer, "pair").startswith("--pair FLOAT FLOAT\n")
    assert help_on(Outer, "kind").startswith("--kind {a,b}\n")
    for topic in ("nothing", "--", ""):
        with pytest.raises(ValueError, match="no section or option has this in its name or text. Sections: inner."):
            help_on(Outer, topic)


def test_a_topic_that_no_name_has_is_looked_for_in_texts_and_values() -> None:
    assert help_on(Outer, "second").startswith("--inner.share FLOAT\n")  # and no other option
    assert "\n--" not in help_on(Outer, "second")
    assert help_on(GRPOConfig, "wandb").startswith("--log.to STR\n")
    assert help_on(GRPOConfig, "SGLang").startswith("--engine STR\n")
    with pytest.raises(ValueError, match="in its name or text"):
        help_on(Outer, "econd")  # a part of a word says nothing


def test_the_whole_help_has_every_text() -> None:
    text = whole_help(Outer, "run.py")
    assert "so long that it needs two lines of source. Then it says" in " ".join(text.split())
    assert text.count("(default: ") == 8


@pytest.mark.parametrize(
    ("argv", "code", "wanted"),
    [
        (["--help"], 0, "sections, each with the number of its options:"),
        (["--width", "3", "-h"], 0, "sections, each with the number of its options:"),
        (["--help", "--width", "3"], 0, "sections, each with the number of its options:"),
        (["--help", "inner.share"], 0, "--inner.share FLOAT"),
        (["--help-all"], 0, "--inner.share FLOAT"),
        (["--help_all"], 0, "--inner.share FLOAT"),
        (["--help", "shade"], 2, "error: --help shade: no section or option has this in its name or text."),
    ],
)
def test_the_flags_of_help(argv: list[str], code: int, wanted: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        parse_config(Outer, argv, "run.py")
    said = capsys.readouterr()
    assert end.value.code == code
    assert wanted in (said.err if code else said.out)


def test_the_short_help_of_a_trainer_fits_on_a_screen_or_two() -> None:
    lines = short_help(GRPOConfig, "scripts/train_grpo.py").splitlines()
    assert len(lines) < 90
    assert max(map(len, lines)) <= 120
