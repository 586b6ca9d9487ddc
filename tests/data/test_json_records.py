import pytest

from lightrl.data.json_records import parse_json, require_object


def test_escaped_pairs_are_characters_and_halves_are_none() -> None:
    assert parse_json(rb'"\ud83d\ude00"', "here", "") == "\N{GRINNING FACE}"
    assert parse_json(rb'"\\ud83d"', "here", "") == "\\ud83d"  # a backslash and letters
    with pytest.raises(ValueError, match=r"^here: it holds '.ud83d', half of a pair of surrogates"):
        parse_json(rb'{"a": ["\ud83d"]}', "here", "")


def test_what_is_no_json_is_told_with_what_is_wanted() -> None:
    for content in (b"{", b"[" * 100_000, b"1" * 5000):
        with pytest.raises(ValueError, match=r"^here: not valid JSON \(.*\)\. Give an object\.$"):
            parse_json(content, "here", "Give an object.")


def test_a_mistake_has_one_line_number() -> None:
    for content, where, reason in (
        (b'{"a": 1,\n', "data.jsonl:7", "Expecting property name enclosed in double quotes: column 9"),
        (b'{"a" 1}', "data.jsonl:7", "Expecting ':' delimiter: column 6"),
        (b'[{"a": 1},\n {"b" 2}]\n', "data.json", "Expecting ':' delimiter: line 2 column 7"),
    ):
        with pytest.raises(ValueError) as error:  # noqa: PT011  (compared as a whole)
            parse_json(content, where, "Give it.")
        assert str(error.value) == f"{where}: not valid JSON ({reason}). Give it."  # one number of a line


def test_a_list_is_no_record() -> None:
    with pytest.raises(ValueError, match="here: a record is of type list"):
        require_object([], "here")
