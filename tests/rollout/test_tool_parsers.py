"""Calls as policies write them."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from linear_time import require_linear

from lightrl.rollout.tool_parsers import (
    PARSERS,
    ToolCall,
    typed_arguments,
)

hermes_calls, json_calls, python_calls = (PARSERS[name].calls_in for name in ("hermes", "json", "python"))
ADD = {"a": 1, "b": [2]}
WRITTEN = '{"name": "add", "arguments": {"a": 1, "b": [2]}}'


def test_hermes() -> None:
    text = f'So: <tool_call>\n{WRITTEN}\n</tool_call><tool_call>{{"name": "now"}}</tool_call> {WRITTEN}'
    assert hermes_calls(text) == [ToolCall("add", ADD), ToolCall("now", {})]
    assert hermes_calls("<tool_call>no end") == []


@pytest.mark.parametrize(
    ("parser", "write"),
    [
        ("hermes", "<tool_call>{}</tool_call>"),
        ("json", "{}"),
        ("llama", "{}"),
        ("mistral", "[TOOL_CALLS][{}]"),
        ("python", "```python\n{}```"),
    ],
)
def test_calls_in_thoughts_are_drafts(parser: str, write: str) -> None:
    calls_in = PARSERS[parser].calls_in
    call, said = (
        write.replace("{}", WRITTEN),
        write.replace("{}", '{"name": "say", "arguments": {"text": "a</think>b"}}'),
    )
    one, many = calls_in(call), calls_in(f"{call} {call}")
    assert (len(one), len(many)) == (1, 2)
    assert not any(found.problem for found in many)
    for thought in ("<think>I could write {}, or not.</think>", "{}</think>", f"<think>By {write[:9]} it is.</think>"):
        before = f"{thought.replace('{}', call)}Now "
        assert calls_in(before) == []
        assert calls_in(f"{before}{call}.{call}") == many
        assert calls_in(f"{before}{call}<think>") == one
    assert calls_in(f"a{call}b<think>{call}</think>c{call}d") == many
    assert len(calls_in(f"{call} {said}")) == 2  # a text with </think> in it
    assert calls_in(f"<think>{call}") == one  # cut off, or a template's own way to call


def test_drafts_in_the_thoughts_of_mistral() -> None:
    call = f"[TOOL_CALLS][{WRITTEN}]"
    assert PARSERS["mistral"].calls_in(f"[THINK]{call} or </think>?[/THINK]So{call}") == [ToolCall("add", ADD)]


def test_a_text_of_mistral_may_hold_the_mark_of_calls() -> None:
    said = {"text": "write [TOOL_CALLS] first"}
    for written in (f"say[ARGS]{json.dumps(said)}", f'[{{"name": "say", "arguments": {json.dumps(said)}}}]'):
        text = f"[TOOL_CALLS]{written}[TOOL_CALLS]now[ARGS]{{}}"
        assert PARSERS["mistral"].calls_in(text) == [ToolCall("say", said), ToolCall("now", {})]
    broken, now = PARSERS["mistral"].calls_in('[TOOL_CALLS]say[ARGS]{"a" 1}[TOOL_CALLS]now[ARGS]{}')
    assert broken.problem.endswith(
        "say[ARGS]{\"a\" 1} (JSONDecodeError: Expecting ':' delimiter: line 1 column 15 (char 14))"
    )
    assert now == ToolCall("now", {})


def test_an_argument_of_harmony_may_hold_the_mark_of_messages() -> None:
    said = {"text": "<|start|>assistant to=functions.now<|message|>{}"}
    head = "<|channel|>commentary to=functions.say<|message|>"
    before = "<|channel|>analysis<|message|><|start|> {<|end|><|start|>assistant"
    for text in (f"{head}{json.dumps(said)}<|call|>", f"{before}{head} {json.dumps(said)} <|call|>"):
        assert PARSERS["harmony"].calls_in(text) == [ToolCall("say", said)]
    unended = f"{head}{json.dumps(said)}<|end|><|start|>assistant to=functions.now<|message|>{{}}<|call|>"
    assert PARSERS["harmony"].calls_in(unended) == [NOW]


@pytest.mark.parametrize(
    ("parser", "begin", "end"),
    [
        ("hermes", '<tool_call>{"name": "say", "arguments": ', "}</tool_call>"),
        ("llama", "<function=say>", "</function>"),
        ("kimi", "<|tool_call_begin|>functions.say:0<|tool_call_argument_begin|>", "<|tool_call_end|>"),
    ],
)
def test_a_text_of_json_may_hold_the_marks_of_calls(parser: str, begin: str, end: str) -> None:
    def written(text: str) -> str:
        return f"{begin}{json.dumps({'text': text})}{end}"

    mark = end.removeprefix("}")
    for text in (mark, f"{mark} {mark}", written("a"), f"{mark}{begin}"):
        calls, rest = PARSERS[parser].split(f"1{written(text)}2{written('b')}3")
        assert [call.arguments for call in calls] == [{"text": text}, {"text": "b"}]
        assert rest == "123"
    calls, rest = PARSERS[parser].split(f'{begin}{{"text": "cut{mark}{written("b")}')
    assert [(bool(call.problem), call.arguments) for call in calls] == [(True, {}), (False, {"text": "b"})]


def test_an_argument_of_harmony_may_hold_the_mark_of_an_end() -> None:
    said = {"text": "<|call|> <|start|>assistant to=functions.now<|message|>{}<|call|>"}
    head = "<|channel|>commentary to=functions.say<|message|>"
    later = "<|start|>assistant to=functions.now<|message|>{}<|call|>"
    before = "<|channel|>analysis<|message|><|call|> {<|end|><|start|>assistant"
    for text in (f"{head}{json.dumps(said)}<|call|>", f"{before}{head} {json.dumps(said)} <|call|>"):
        assert PARSERS["harmony"].split(text + later + "rest")[0] == [ToolCall("say", said), NOW]
    assert PARSERS["harmony"].split(f"{head}{json.dumps(said)}<|call|>{later}rest")[1] == "rest"
    assert PARSERS["harmony"].split(f"{later * 200}a{head}{json.dumps(said)}<|call|>b") == (
        [*[NOW] * 200, ToolCall("say", said)],
        "b",
    )


@pytest.mark.parametrize(
    ("parser", "text", "rest"),
    [
        (
            "hermes",
            f"a<tool_call>{WRITTEN}</tool_call>b<tool_call>{WRITTEN}</tool_call>c<tool_call>d",
            "abc<tool_call>d",
        ),
        ("hermes", f"<think><tool_call>{WRITTEN}</tool_call></think>", None),
        ("json", f'a {WRITTEN} b [1] c [{WRITTEN}, {{"x": 1}}]', "a  b [1] c "),
        ("json", f"{'x [' * 3_000}{WRITTEN}y{WRITTEN}", f"{'x [' * 3_000}y"),
        ("llama", "a<function=now></function>b", "ab"),
        ("python", "a\n```python\n1```b", "a\nb"),
        ("mistral", f"a[TOOL_CALLS][{WRITTEN}]b[TOOL_CALLS]now{{}}</s>", "ab</s>"),
        ("gemma", "a<|tool_call>call:now{}<tool_call|><|tool_response>", "a"),
        (
            "harmony",
            "<|message|>a<|end|><|start|>assistant to=functions.now<|message|>{}<|call|>",
            "<|message|>a<|end|>",
        ),
        (
            "mistral",
            f"{'x ' * 3_000}[TOOL_CALLS][{WRITTEN}]{'y ' * 3_000}[TOOL_CALLS]now{{}}",
            "x " * 3_000 + "y " * 3_000,
        ),
    ],
)
def test_what_is_left_of_a_text_without_its_calls(parser: str, text: str, rest: str | None) -> None:
    calls, left = PARSERS[parser].split(text)
    assert left == (text if rest is None else rest)
    assert calls == PARSERS[parser].calls_in(text)
    assert bool(calls) is (rest is not None)


def tags(inside: str) -> str:
    return f"<tool_call>\n{inside}\n</tool_call>"


def test_calls_in_tags() -> None:
    code = "<parameter=code>\n\nif a < b:\n  c\n\n</parameter>"
    written = f"<function=add>\n<parameter=a>\n1\n</parameter>\n{code}\n</function>"
    assert hermes_calls(tags(written)) == [
        ToolCall("add", {"a": "1", "code": "\nif a < b:\n  c\n"}, has_texts=True)  # without one line break at each end
    ]
    assert hermes_calls(tags("<function=now></function>")) == [ToolCall("now", {}, has_texts=True)]
    for wrong, problem in (
        ("<function=add><parameter=a>1</parameter>", "ends with </function>"),
        ("<function=add>a</function>", "a call holds only"),
        ("<function=add><parameter=a>1</parameter><parameter=b>2</function>", "a call holds only"),
    ):
        (call,) = hermes_calls(tags(wrong))
        assert problem in call.problem


def test_texts_get_the_types_of_the_description() -> None:
    texts = {"a": "1", "b": "1", "c": "[1, 2]", "d": "True", "e": "x", "f": "null", "g": "2"}
    properties: dict[str, Any] = {
        "a": {"type": "integer"},
        "b": {"type": "string"},
        "f": {"type": ["string", "null"]},
        "g": "odd",
    }
    described = {"type": "function", "function": {"name": "f", "parameters": {"properties": properties}}}
    typed = {"a": 1, "b": "1", "c": [1, 2], "d": True, "e": "x", "f": None, "g": 2}
    assert typed_arguments(ToolCall("f", dict(texts), has_texts=True), described) == typed
    assert typed_arguments(ToolCall("f", dict(texts), has_texts=True), None) == {**typed, "b": 1}
    assert typed_arguments(ToolCall("f", dict(texts)), described) == texts
    for key in ("anyOf", "oneOf"):
        for kind, value in (("string", "1"), ("integer", 1)):
            properties["b"] = {key: [{"type": kind}, {"type": "null"}]}
            assert typed_arguments(ToolCall("f", {"b": "1"}, has_texts=True), described) == {"b": value}
            assert typed_arguments(ToolCall("f", {"b": "null"}, has_texts=True), described) == {"b": None}
    for kind, text, value in (("array", '["a"]', ["a"]), ("object", "{}", {}), ("array", "{}", "{}"), (None, "x", "x")):
        properties["b"] = {"anyOf": [{"type": "string"}, {"type": kind}]}
        assert typed_arguments(ToolCall("f", {"b": text}, has_texts=True), described) == {"b": value}


def test_a_turn_that_repeats_one_token_is_read_at_once() -> None:
    def reads(calls_in: Any, written: Callable[[int], str], count: int, found: Callable[[Any], object]) -> None:
        assert found(calls_in(written(count)))
        require_linear(calls_in, written, count)

    def is_add(calls: Any) -> bool:
        return calls == [ToolCall("add", ADD)]

    opened = "<function=add>"
    reads(hermes_calls, lambda n: f"<tool_call>{WRITTEN}</tool_call>" + "<tool_call>\n" * n, 20_000, is_add)
    for end, found in (("", lambda calls: calls[0].problem), ("</parameter>", lambda calls: calls[0].name == "add")):
        reads(hermes_calls, lambda n, e=end: tags(opened + "<parameter=a>\n" * n + e + "</function>"), 20_000, found)
    ends = "</parameter></function>"
    reads(hermes_calls, lambda n: tags(opened + "<parameter=" * n + ends), 10_000, lambda calls: calls[0].problem)
    reads(json_calls, lambda n: f"{WRITTEN} " + "[" * n + f" {WRITTEN}", 30_000, is_add)
    reads(json_calls, lambda n: f"{WRITTEN} " + '{"a":' * n + f" {WRITTEN}", 10_000, is_add)
    reads(json_calls, lambda n: "{" * n + WRITTEN, 100_000, is_add)
    reads(json_calls, lambda n: "[not JSON]" * n + WRITTEN, 100_000, is_add)  # each error counts lines


def test_json() -> None:
    assert json_calls(f"So: {WRITTEN} and then") == [ToolCall("add", ADD)]
    assert json_calls(f'```json\n[{WRITTEN}, {{"name": "now", "parameters": {{}}}}]\n```') == [
        ToolCall("add", ADD),
        ToolCall("now", {}),
    ]
    # Arguments as a text, as some write them; objects without both, and half an object, are no calls.
    assert json_calls('{"name": "add", "arguments": "{\\"a\\": 1}"}') == [ToolCall("add", {"a": 1})]
    assert json_calls('{"a": 1} [1, 2] {"name": "Ada", "age": 36} {"name": "add", {oops') == []


NOW = ToolCall("now", {})
FENCE = "```"
KIMI = "<|tool_call_begin|>{}<|tool_call_argument_begin|>{}<|tool_call_end|>"


def deepseek(inside: str) -> str:
    """Writes an ASCII form with the characters that the tokens have."""
    return inside.replace("<|", "<\uff5c").replace("|>", "\uff5c>").replace("_", "\u2581")


@pytest.mark.parametrize(
    ("parser", "text", "calls"),
    [
        (  # the template of GLM-4.5; that of GLM-4.7 has no line breaks
            "glm",
            "<think>add?</think>\n<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n<arg_key>b</arg_key>\n"
            "<arg_value>[2]</arg_value>\n</tool_call>\n<tool_call>now</tool_call><|observation|>",
            [
                ToolCall("add", {"a": "1", "b": "[2]"}, has_texts=True),
                ToolCall("now", {}, has_texts=True),
            ],
        ),
        (
            "glm",
            "<tool_call>say<arg_key>text</arg_key><arg_value>  a\n b</arg_value></tool_call>",
            [ToolCall("say", {"text": "  a\n b"}, has_texts=True)],
        ),
        (
            "kimi",
            "So<|tool_calls_section_begin|>"
            + KIMI.format("functions.add:0", '{"a": 1, "b": [2]}')
            + KIMI.format(" now:1\n", "{}")
            + "<|tool_calls_section_end|><|im_end|>",
            [ToolCall("add", ADD, id="functions.add:0"), ToolCall("now", {}, id="now:1")],
        ),
        (
            "kimi",
            KIMI.format("functions.files.read-all:12", "{}"),
            [ToolCall("files.read-all", {}, id="functions.files.read-all:12")],
        ),
        (  # V3
            "deepseek",
            deepseek("<|tool_calls_begin|>")
            + deepseek("<|tool_call_begin|>function<|tool_sep|>")
            + f'add\n{FENCE}json\n{{"a": 1, "b": [2]}}\n{FENCE}'
            + deepseek("<|tool_call_end|>\n<|tool_call_begin|>function<|tool_sep|>")
            + f"now\n{FENCE}json\n{{}}\n{FENCE}"
            + deepseek("<|tool_call_end|><|tool_calls_end|><|end_of_sentence|>"),
            [ToolCall("add", ADD), NOW],
        ),
        (  # V3.1
            "deepseek",
            deepseek("<|tool_calls_begin|><|tool_call_begin|>add<|tool_sep|>")
            + '{"a": 1, "b": [2]}'
            + deepseek("<|tool_call_end|><|tool_call_begin|>now<|tool_sep|>{}<|tool_call_end|><|tool_calls_end|>"),
            [ToolCall("add", ADD), NOW],
        ),
        (
            "mistral",
            f'So[TOOL_CALLS] [{WRITTEN}, {{"name": "now", "arguments": {{}}, "id": "abc123def"}}]</s>',
            [ToolCall("add", ADD), ToolCall("now", {}, id="abc123def")],
        ),
        (  # an id that the template would refuse is not taken over
            "mistral",
            '[TOOL_CALLS][{"name": "now", "arguments": {}, "id": "call-1"}, {"name": "now", "arguments": {}, "id": 7}]',
            [NOW, NOW],
        ),
        (
            "mistral",
            '[TOOL_CALLS]add[ARGS]{"a": 1, "b": [2]}[TOOL_CALLS]now[CALL_ID]abc123def[ARGS]{}[TOOL_CALLS]now{}</s>',
            [ToolCall("add", ADD), ToolCall("now", {}, id="abc123def"), NOW],
        ),
        (
            "llama",
            'So <function=add>{"a": 1, "b": [2]}</function> <function=now></function>',
            [ToolCall("add", ADD), NOW],
        ),
        ("llama", '{"type": "function", "name": "add", "parameters": {"a": 1, "b": [2]}}', [ToolCall("add", ADD)]),
        (
            "gemma",
            "So<|tool_call>call:add{a:1,b:[2]}<tool_call|><|tool_call>call:now{}<tool_call|><|tool_response>",
            [ToolCall("add", ADD), NOW],
        ),
        (
            "gemma",
            '<|tool_call>call:say{text:<|"|>a: {b:"c"}, True<|"|>,'
            'to:{all:true,but:None, n_1:[-1.5,<|"|>x<|"|>]}}<tool_call|>',
            [ToolCall("say", {"text": 'a: {b:"c"}, True', "to": {"all": True, "but": None, "n_1": [-1.5, "x"]}})],
        ),
        (
            "gemma",
            "<|tool_call>call:find{$gt:1, 2nd :2,first name:{@id:3,a-b:4}}<tool_call|>",
            [ToolCall("find", {"$gt": 1, "2nd": 2, "first name": {"@id": 3, "a-b": 4}})],
        ),
        (
            "gemma",
            "<|channel>thought\n<|tool_call>call:now{}<tool_call|>?<channel|><|tool_call>call:add{a:1,b:[2]}<tool_call|>",
            [ToolCall("add", ADD)],
        ),
        (
            "harmony",
            "<|channel|>analysis<|message|>to=functions.now<|end|><|start|>assistant"
            '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1, "b": [2]}<|call|>',
            [ToolCall("add", ADD)],
        ),
        ("harmony", " to=functions.now<|channel|>commentary json<|message|>{}<|call|>", [NOW]),
        ("harmony", "<|channel|>analysis to=python<|message|>1+1<|call|>", []),
        ("json", f'{{"type": "function", "function": {WRITTEN}}}', [ToolCall("add", ADD)]),
        ("json", '{"type": "function", "function": {"name": "add", "parameters": {}}}', []),  # describes a tool
    ],
)
def test_notations_of_other_models(parser: str, text: str, calls: list[ToolCall]) -> None:
    assert PARSERS[parser].calls_in(text) == calls


@pytest.mark.parametrize(
    ("parser", "text", "problem"),
    [
        ("glm", "<tool_call>add <arg_key>a</arg_key></tool_call>", "a call is a name and <arg_key>"),
        ("glm", f"<tool_call>{WRITTEN}</tool_call>", "a call is a name and <arg_key>"),
        ("glm", "<tool_call></tool_call>", "a call is a name and <arg_key>"),
        ("kimi", KIMI.format("functions.add", "{}"), "a call is functions.NAME:NUMBER"),
        ("kimi", "<|tool_call_begin|>functions.add:0{}<|tool_call_end|>", "a call is functions.NAME:NUMBER"),
        ("kimi", KIMI.format("functions.add:0", '{"a": '), "JSONDecodeError"),
        ("kimi", KIMI.format("functions.add:0", "[1]"), "the arguments are an object"),
        ("kimi", KIMI.format("functions.add:0", "[" * 5_000), "RecursionError"),
        ("deepseek", deepseek("<|tool_call_begin|>add<|tool_call_end|>"), "the separator"),
        ("deepseek", deepseek("<|tool_call_begin|>add<|tool_sep|>a=1<|tool_call_end|>"), "JSONDecodeError"),
        ("mistral", "[TOOL_CALLS]add[ARGS]{oops", "JSONDecodeError"),
        ("mistral", "[TOOL_CALLS] add(1)", "JSONDecodeError"),
        ("mistral", "[TOOL_CALLS][1]", "a call is an object with a name and arguments"),
        ("mistral", "[TOOL_CALLS]add[ARGS][1]", "the arguments are an object"),
        ("llama", "<function=add>a=1</function>", "JSONDecodeError"),
        ("gemma", '<|tool_call>call:add{a:<|"|>1}<tool_call|>', "a call is call:NAME{...}"),
        ("gemma", "<|tool_call>{a:1}<tool_call|>", "a call is call:NAME{...}"),
        ("gemma", "<|tool_call>call:add{a:one}<tool_call|>", "JSONDecodeError"),
        ("gemma", "<|tool_call>call:add[1]<tool_call|>", "the arguments are an object"),
        ("harmony", '<|channel|>commentary to=functions.add<|message|>{"a": <|call|>', "JSONDecodeError"),
    ],
)
def test_a_bad_call_of_another_notation_says_why(parser: str, text: str, problem: str) -> None:
    (found,) = PARSERS[parser].calls_in(text)
    assert problem in found.problem
    assert len(found.problem) < 500


@pytest.mark.parametrize("parser", sorted(PARSERS))
def test_a_call_without_its_end_is_a_text(parser: str) -> None:
    for text in (
        "",
        "[TOOL_CALLS]",
        "<function=add>{}",
        "<tool_call>add",
        KIMI.format("functions.add:0", "{}").removesuffix("<|tool_call_end|>"),
        deepseek("<|tool_call_begin|>add<|tool_sep|>{}"),
        "<|tool_call>call:add{}",
        "<|channel|>commentary to=functions.add<|message|>{}<|end|>",
    ):
        assert PARSERS[parser].calls_in(text) == []


@pytest.mark.parametrize(
    ("parser", "around"),
    [
        ("json", "{}"),
        ("llama", "<function=a>{}</function>"),
        ("glm", "<tool_call>a{}</arg_value></tool_call>"),
        ("kimi", "<|tool_call_begin|>{}<|tool_call_end|>"),
        ("deepseek", deepseek("<|tool_call_begin|>") + "{}" + deepseek("<|tool_call_end|>")),
        ("mistral", "[TOOL_CALLS]a{}"),
        ("gemma", "<|tool_call>call:a{}<tool_call|>"),
        ("harmony", "<|start|>assistant to=functions.a<|message|>{}<|call|>"),
    ],
)
def test_a_turn_that_repeats_an_opener_is_read_at_once(parser: str, around: str) -> None:
    for opener in (
        "[TOOL_CALLS]a",
        '[TOOL_CALLS]a{"',
        "<function=a>",
        "<arg_key>a</arg_key><arg_value>",
        KIMI[:19],
        deepseek(KIMI[:19]),
        "<|tool_call>call:a{a",
        "<|start|>to=functions.a",
        '<|start|>to=functions.a<|message|>{"',
        '<|start|>to=functions.a<|message|>{"<|call|>',
    ):
        for text in ("{}", around):
            require_linear(PARSERS[parser].calls_in, lambda n, t=text, o=opener: t.replace("{}", o * n), 100_000)


def test_python_in_thoughts_may_lack_its_end() -> None:
    text = "<think>\n```python\ndraft(\n</think>\n```python\nprint(1)\n```"
    assert python_calls(text) == [ToolCall("python", {"code": "print(1)\n"})]


def test_python() -> None:
    text = "First\n```python\nprint(1)\n```\nthen\n```py\nprint(2)\n```\n```\nprint(3)\n```"
    assert python_calls(text) == [
        ToolCall("python", {"code": "print(1)\n"}),
        ToolCall("python", {"code": "print(2)\n"}),
    ]


@pytest.mark.parametrize(
    ("written", "problem"),
    [
        ("{oops", "JSONDecodeError"),
        ("[1]", "a call is an object with a name and arguments"),
        ('{"arguments": {}}', "KeyError: 'name'"),
        ('{"name": "add", "arguments": [1]}', "the arguments are an object"),
        ('{"name": 3}', "the name is a text"),
        ("[" * 5_000, "this call cannot be made: [[["),
    ],
)
def test_a_call_that_cannot_be_read_says_why(written: str, problem: str) -> None:
    (found,) = hermes_calls(f"<tool_call>{written}</tool_call>")
    assert problem in found.problem
    assert len(found.problem) < 500
