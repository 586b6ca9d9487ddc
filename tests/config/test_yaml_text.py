"""Whatever is wrong with a YAML text is told in one sentence, soon, and without running anything."""

from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lightrl.config import GRPOConfig, named_values
from lightrl.config.command_line import _yaml_flags
from lightrl.config.yaml_text import parse_yaml, read_yaml

BOMB = "l0: &l0 {}\n" + "\n".join(f"l{i}: &l{i} {{a: *l{i - 1}, b: *l{i - 1}}}" for i in range(1, 40))
WRONG_FILES: dict[str, tuple[str | bytes, str]] = {
    "100,000 nested lists": ("a: " + "[" * 100_000, "its brackets are nested too deeply."),
    "100,000 nested mappings": ("{a: " * 100_000, "its brackets are nested too deeply."),
    "5,000 digits": ("max_steps: " + "1" * 5000, "is not valid YAML: Exceeds the limit"),
    "an escape beyond Unicode": ('model: "\\UFFFFFFFF"', "is not valid YAML: "),
    "a tab": ("\tlr: 1", "is not valid YAML: while scanning for the next token, found character"),
    "a mapping that holds itself": ("optim: &a {optim: *a, b: *a}", "is nested too deeply"),
    "a mapping that doubles forty times": (BOMB, "is nested too deeply"),
    "no UTF-8": (b"lr: \xff\xfe", "it is not UTF-8 text"),
    "a surrogate in UTF-8": (b"model: \xed\xa0\x80", "it is not UTF-8 text"),
    "NUL": ("lr: \0", "is not valid YAML: unacceptable character #x0000"),
    "a list": ("- 1", "must hold `option: value` lines, not a list."),
    "a number": ("5", "must hold `option: value` lines, not a int."),
    "a Python object": ("lr: !!python/object/apply:os.system ['ls']", "could not determine a constructor for the tag"),
    "no value in a list": ("stop:\n- a\n- ", "stop has an empty value in its list. Give one, or put quotes around it."),
    "no value": ("lr:", "lr has no value. Give one, or leave the line out."),
    "a number for a name": ("5: 3", "unknown option '5'."),
    "a list for a name": ("? [a]\n: b", "found unhashable key"),
    "a section with a value": ("optim: 5", "unknown option 'optim'. Did you mean optim.eps"),
    "an option with a section": ("lr: {a: 1}", "unknown option 'lr.a'. Did you mean lr"),
    "a flag in a list": (
        "reward: ['5', '--lr']",
        "reward is ['5', '--lr']: of several values only the first may begin with a dash. Move it there.",
    ),
    "an option twice": ("lr: 1e-6\n# a comment\nlr: 2e-6", "it gives 'lr' twice, in lines 1 and 3. Keep one."),
    "an option twice in a line": ("optim: {eps: 1.0, 'eps': 2.0}", "it gives 'eps' twice, in line 1."),
    "a section twice": ("optim:\n  eps: 1.0\noptim:\n  eps: 2.0", "it gives 'optim' twice, in lines 1 and 3."),
    "an option on its own and in its section": (
        "optim.eps: 1.0\noptim: {eps: 2.0}",
        "optim.eps is given twice, on its own and in a section. Keep one.",
    ),
    "two megabytes": ("# " + "x" * 2_000_000, "has 2,000,002 bytes: a file of options has at most 1,048,576."),
}


@pytest.mark.timeout(30)
@pytest.mark.parametrize("kind", list(WRONG_FILES))
def test_a_wrong_file_of_options_gives_one_sentence(kind: str, tmp_path: Path) -> None:
    content, text = WRONG_FILES[kind]
    path = tmp_path / "options.yaml"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError) as error:  # noqa: PT011  (the text is compared below)
        _yaml_flags(GRPOConfig, str(path))
    assert text in str(error.value)
    assert "\n" not in str(error.value)


OPEN = "while parsing a flow sequence, expected ',' or ']',"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("lr: 1\nstop: [1\nseed: 3\n", f"{OPEN} but got ':': line 3 column 5"),
        ("lr: 1\nstop: [1, 2\n", f"{OPEN} but got '<stream end>': line 2 column 7"),
        ("[1", f"{OPEN} but got '<stream end>': column 3"),
        ("lr: 1\n  x: 3\n", "mapping values are not allowed here: line 2 column 4"),
    ],
)
def test_a_mistake_has_one_place(text: str, said: str) -> None:
    with pytest.raises(ValueError) as error:  # noqa: PT011  (compared as a whole)
        parse_yaml(text, "it")
    assert str(error.value) == f"it is not valid YAML: {said}"


def test_an_option_that_is_a_text_gets_what_the_file_says(tmp_path: Path) -> None:
    path = tmp_path / "options.yaml"
    path.write_text(
        "output_dir: 20261127_1200\nstop: [No, 12:30, 007, 1.10, 'yes', ' two']\nlog: {to: off}\n"
        "share_prompts: no\nlr: 2e-6\nmax_steps: 1_000\n"
    )
    assert _yaml_flags(GRPOConfig, str(path)) == [
        "--output_dir=20261127_1200", "--stop=No", "12:30", "007", "1.10", "yes", " two", "--log.to=off",
        "--share_prompts=False", "--lr=2e-6", "--max_steps=1000",
    ]  # fmt: skip


def test_a_number_is_decimal_and_a_date_is_a_text(tmp_path: Path) -> None:
    path = tmp_path / "options.yaml"
    path.write_text("output_dir: 2026-99-99\nseed: 010\nmax_steps: 0_8\nstop: ['~', 'null']")
    assert _yaml_flags(GRPOConfig, str(path)) == [
        "--output_dir=2026-99-99", "--seed=10", "--max_steps=0_8", "--stop=~", "null"
    ]  # fmt: skip
    values = parse_yaml("[-007, +010, 01_0, 0x10, 0b11, 1_000, 0, 2026-01-01]", "it")
    assert values == [-7, 10, 10, 16, 3, 1000, 0, "2026-01-01"]


def test_a_time_is_a_text_and_no_number_of_minutes(tmp_path: Path) -> None:
    values = parse_yaml("[1:30, -1:30, 1:30:00, 1:30.5, 1_0:00, 90, 1.5, .inf]", "it")
    assert values == ["1:30", "-1:30", "1:30:00", "1:30.5", "1_0:00", 90, 1.5, float("inf")]
    assert named_values(["x=1:30", "y=1:30.5"], "engine_args") == {"x": "1:30", "y": "1:30.5"}
    (path := tmp_path / "options.yaml").write_text("max_steps: 1:30\nlr: 1:00.5")
    assert _yaml_flags(GRPOConfig, str(path)) == ["--max_steps=1:30", "--lr=1:00.5"]  # which the parser refuses


def test_a_name_may_replace_one_that_a_merge_brings_in() -> None:
    text = "a: &a {x: 1, y: 1}\nb: &b {<<: *a, y: 2}\nc: {<<: *b, y: 3}\nd: {<<: *b, x: 4}"
    found = parse_yaml(text, "it")
    assert (found["b"], found["c"], found["d"]) == ({"x": 1, "y": 2}, {"x": 1, "y": 3}, {"x": 4, "y": 2})
    found = parse_yaml("a: &a {x: 1}\nb: [{c: &c {<<: *a, y: 2}}]\nd: {<<: *c, z: 3}", "it")  # c is read after d
    assert found["d"] == {"x": 1, "y": 2, "z": 3}


def test_values_as_written_are_texts_except_for_those_that_are_none() -> None:
    found = parse_yaml("a: &a {x: No, y: 010}\nb: {<<: *a, y: 1.10, z: ~}", "it", as_written=True)
    assert found["b"] == {"x": "No", "y": "1.10", "z": None}


def test_a_number_and_a_text_are_two_names() -> None:
    assert parse_yaml("{1: a, '1': b}", "it") == {1: "a", "1": "b"}


def test_the_first_mapping_of_a_merged_list_wins() -> None:
    text = "a: &a {width: 1}\nb: &b {width: 2, depth: 3}\nc: {<<: [*a, *b], depth: 4}\nd: {<<: [*b, *a]}"
    found = parse_yaml(text, "it")
    assert (found["c"], found["d"]) == ({"width": 1, "depth": 4}, {"width": 2, "depth": 3})


@pytest.mark.parametrize("value", ["1", "[*a, 2]"])
def test_what_a_merge_names_is_a_mapping(value: str) -> None:
    with pytest.raises(ValueError, match="<< names a mapping, or a list of them"):
        parse_yaml(f"a: &a {{x: 1}}\nb: {{<<: {value}}}", "it")


@pytest.mark.parametrize(
    "value", ["[1", "[" * 100_000, "1" * 5000, "!!python/name:os.system", "\0", "*a", "{a: 1, a: 2}"]
)
def test_a_wrong_value_of_an_argument_names_its_option(value: str) -> None:
    with pytest.raises(ValueError, match=r"^--engine_args 'x=.* is not valid YAML: ") as error:
        named_values([f"x={value}"], "engine_args")
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 600


@settings(max_examples=80, deadline=None, derandomize=True, database=None)
@given(st.text(alphabet=st.sampled_from("a1:-[]{}!&*?|>'\"%@`,# \n\t<.~\ud800\0e"), max_size=40) | st.text(max_size=40))
@example("? ? ?")
@example("&a [*a]")
@example("1e999999999")
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        parse_yaml(text, "it")
    except ValueError as error:
        assert str(error).startswith("it is not valid YAML: ")  # noqa: PT017
        assert "\n" not in str(error)  # noqa: PT017


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(st.binary(max_size=60) | st.text(alphabet="lr:optimf_{}[],.- \n&a*", max_size=40).map(str.encode))
def test_any_file_is_read_or_refused(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "any.yaml"
    path.write_bytes(content)
    try:
        read_yaml(path, "it")
        _yaml_flags(GRPOConfig, str(path))
    except ValueError as error:
        assert str(error)  # noqa: PT017
