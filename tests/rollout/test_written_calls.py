"""What stands between the marks of calls, outside a turn's thoughts."""

from __future__ import annotations

import pytest

from lightrl.rollout.written_calls import Found, ToolCall, bad_call, marked, marked_calls, without_drafts

MARKS = ("<c>", "</c>")


def test_marked_leaves_out_what_is_in_thoughts_or_has_no_end() -> None:
    text = "<think>a<c>1</c></think>b<c>2</c>c<c></c>d<c>5"
    assert [match[1] for match in marked(text, MARKS)] == ["2", ""]
    own = text.replace("think>", "t>")
    assert [match[1] for match in marked(own, MARKS)] == ["1", "2", ""]
    assert [match[1] for match in marked(own, MARKS, ("<t>", "</t>"))] == ["2", ""]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("<c>0</c><think><c>1</c></think><c>2</c>", ["0", "2"]),
        ("<c>1</c></think><c>2</c>", ["2"]),  # the chat template has written <think>
        ("<think><c>draft</think><c>2</c>", ["2"]),
        ("<c>a</think>b</c><c>2</c>", ["a</think>b", "2"]),  # an argument
        ("<c>0</c> and <c>a</think>b</c>", ["0", "a</think>b"]),
        ("<think>a</think><c>2", []),
    ],
)
def test_drafts_in_thoughts_are_no_calls_and_arguments_may_hold_the_end_of_thoughts(
    text: str, found: list[str]
) -> None:
    assert [match[1] for match in marked(text, MARKS)] == found


def test_marked_calls_have_their_places() -> None:
    text = "b<c>2</c>c<c>3</c>"
    found = marked_calls(text, MARKS, lambda written: ToolCall(written, {}))
    assert [(text[item.start : item.stop], item.calls) for item in found] == [
        ("<c>2</c>", [ToolCall("2", {})]),
        ("<c>3</c>", [ToolCall("3", {})]),
    ]


def test_without_drafts_keeps_what_contains_the_end_of_thoughts() -> None:
    text = "a <think> b </think> c"
    places = [Found(0, 1, []), Found(10, 11, []), Found(21, 22, [])]
    assert without_drafts(text, places) == [places[0], places[2]]
    around = [Found(10, 21, [])]
    assert without_drafts(text, around) == around
    drafts = [Found(0, 1, []), Found(12, 13, [])]  # thoughts that begin with the turn
    assert without_drafts("a </think> b", drafts) == drafts[1:]


def test_a_bad_call_quotes_its_beginning() -> None:
    assert (
        bad_call(" x" * 300, ValueError("why")).problem == f"this call cannot be made: {('x ' * 100)} (ValueError: why)"
    )
