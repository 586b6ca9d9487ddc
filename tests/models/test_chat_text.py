"""Tool calls and descriptions of tools, as chat templates write them into prompts and examples."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import lightrl.models.chat_text as chat_text_module
from lightrl.data.examples import ExampleBuilder, ExampleFields
from lightrl.data.prompts import build_prompts
from lightrl.records import Answer
from lightrl.rollout.client import chat_text

# Of Qwen2.5, in short: tools, and calls with their arguments as JSON.
CALLS = (
    "{% if tools %}[{% for tool in tools %}{{ tool | tojson }}{% endfor %}]{% endif %}"
    "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}{% for c in m.tool_calls or [] %}"
    "{{ c.function.name }}({{ c.function.arguments | tojson }}){% endfor %};{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)
JOINS = CALLS.replace("({{ c.function.arguments | tojson }})", "{{ '(' + c.function.arguments + ')' }}")  # DeepSeek-R1
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"type": "number"}}}}}


def letters(chat_template: str) -> PreTrainedTokenizerFast:
    """A token for each letter."""
    vocabulary = {sign: place for place, sign in enumerate(["</s>", *map(chr, range(32, 127))])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", chat_template=chat_template)


def read(answer: Answer, tokenizer: PreTrainedTokenizerFast) -> str:
    """The text with the trained tokens in [brackets]."""
    marks = {(False, True): "[", (True, False): "]"}
    mask = [*(False for _ in answer.prompt_ids), *answer.loss_mask]
    pieces = [
        marks.get((before, trained), "") + str(tokenizer.convert_ids_to_tokens(token))
        for before, trained, token in zip(
            [False, *mask], mask, [*answer.prompt_ids, *answer.response_ids], strict=False
        )
    ]
    return "".join(pieces) + "]"


def build(record: dict[str, Any], tokenizer: PreTrainedTokenizerFast) -> str:
    (example,) = ExampleBuilder(tokenizer, ExampleFields()).responses([(record, "data.jsonl:1")])
    return read(example.answers[0], tokenizer)


def build_pair(record: dict[str, Any], tokenizer: PreTrainedTokenizerFast) -> list[str]:
    (example,) = ExampleBuilder(tokenizer, ExampleFields()).pairs([(record, "data.jsonl:1")])
    return [read(answer, tokenizer) for answer in example.answers]


def messages(arguments: Any, **further: Any) -> list[dict[str, Any]]:
    call = {"function": {"name": "f", "arguments": arguments, **further}}
    return [
        {"role": "user", "content": "q", **further},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "6"},
    ]


@pytest.mark.parametrize("template", [CALLS, JOINS])
@pytest.mark.parametrize("given", [{"a": 1}, '{"a": 1}', {"a": 1, "b": None, "c": None}])
def test_the_arguments_of_a_call_are_written_as_one_object(template: str, given: Any) -> None:
    """Whether they were an object, JSON as in OpenAI's protocol, or aligned with other calls by a columnar format."""
    told = messages(given, extra=None)
    record = {"messages": [*told, {"role": "assistant", "content": "x"}]}
    assert build(record, letters(template)) == 'u:q;a:[f({"a": 1});]t:6;a:[x;</s>]'
    (prompt,) = build_prompts([({"prompt": told}, "a:1")], letters(template), max_prompt_tokens=99)
    assert prompt.text == 'u:q;a:f({"a": 1});t:6;a:'
    assert chat_text(letters(template), prompt.messages, tools=()) == prompt.text


def test_null_in_json_stays_and_what_is_no_object_is_left_alone() -> None:
    tokenizer = letters(CALLS)
    for given, written in [('{"a": null}', '{"a": null}'), ("{", '"{"'), ("[1]", '"[1]"')]:
        (prompt,) = build_prompts([({"prompt": messages(given)}, "a:1")], tokenizer, max_prompt_tokens=99)
        assert prompt.text == f"u:q;a:f({written});t:6;a:"


@pytest.mark.parametrize("tools", [[TOOL], json.dumps([TOOL]), [{**TOOL, "strict": None}]])
def test_the_tools_of_a_record_are_described(tools: Any) -> None:
    tokenizer = letters(CALLS)
    told = "[" + json.dumps(TOOL) + "]"
    (prompt,) = build_prompts([({"prompt": "q", "tools": tools}, "a:1")], tokenizer, max_prompt_tokens=999)
    assert prompt.text == f"{told}u:q;a:"
    assert build({"prompt": "q", "response": "x", "tools": tools}, tokenizer) == f"{told}u:q;a:[x;</s>]"
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "x"}]
    assert build({"messages": turns, "tools": tools}, tokenizer) == f"{told}u:q;a:[x;</s>]"
    pair = {"prompt": "q", "chosen": "x", "rejected": "y", "tools": tools}
    assert build_pair(pair, tokenizer) == [f"{told}u:q;a:[x;</s>]", f"{told}u:q;a:[y;</s>]"]


@pytest.mark.parametrize("tools", [None, [], "hammer and nails", ["hammer"], {"hammer": 1}, 3])
def test_another_field_of_that_name_describes_no_tools(tools: Any) -> None:
    assert build({"prompt": "q", "response": "x", "tools": tools}, letters(CALLS)) == "u:q;a:[x;</s>]"


def test_an_error_of_a_template_without_calls_is_told() -> None:
    with pytest.raises(ValueError, match="a:1: the tokenizer's chat template refuses 'prompt': can only concatenate"):
        build_prompts([({"prompt": "q"}, "a:1")], letters("{{ 'a' + messages }}"), max_prompt_tokens=9)


def test_tools_that_describe_none_are_told_once(caplog: pytest.LogCaptureFixture) -> None:
    tokenizer, turns = letters(CALLS), [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    chat_text_module._WARNED_OF.clear()
    for tools in (None, "", "null", [], "[]", [TOOL], json.dumps([TOOL])):
        assert build({"messages": turns, "tools": tools}, tokenizer)
    assert not caplog.text
    for other in ("hammer, saw", ["f"], {"name": "f"}, '{"name": "f"}'):
        chat_text_module._WARNED_OF.clear()
        caplog.clear()
        records = [({"messages": turns[:1], "tools": other}, f"data.jsonl:{line}") for line in (1, 2)]
        prompts = build_prompts(records, tokenizer, max_prompt_tokens=99)
        assert [prompt.text for prompt in prompts] == ["u:q;a:"] * 2
        assert caplog.text.count("data.jsonl:1: 'tools' is") == caplog.text.count("'tools' is") == 1


# Like the first template of Phi-3 and many others, leaves out messages of any role but these two.
TWO_ROLES = (
    "{% for m in messages if m.role in ('user', 'assistant') %}{{ m.role[0] }}:{{ m.content | trim }};{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)


@pytest.mark.parametrize("role", ["system", "developer", "tool"])
def test_a_message_that_the_template_leaves_out_is_told_once(role: str, caplog: pytest.LogCaptureFixture) -> None:
    chat_text_module._WARNED_OF.clear()
    turns = [{"role": role, "content": "be brief"}, {"role": "user", "content": "q"}]
    records = [({"messages": turns}, f"data.jsonl:{line}") for line in (1, 2)]
    prompts = build_prompts(records, letters(TWO_ROLES), max_prompt_tokens=99)
    assert [prompt.text for prompt in prompts] == ["u:q;a:"] * 2
    told = f"data.jsonl:1: the chat template leaves out the text of a message of the role {role!r}"
    assert caplog.text.count(told) == 1
    assert caplog.text.count("leaves out") == 1
    chat_text_module._WARNED_OF.clear()
    assert build({"messages": [*turns, {"role": "assistant", "content": "x"}]}, letters(TWO_ROLES)) == "u:q;a:[x;</s>]"
    assert caplog.text.count("leaves out") == 2


def test_a_lost_text_whose_longest_word_names_a_role_is_told(caplog: pytest.LogCaptureFixture) -> None:
    chat_text_module._WARNED_OF.clear()
    named = TWO_ROLES.replace("m.role[0]", "m.role")
    turns = [{"role": "developer", "content": "be my assistant"}, {"role": "user", "content": "q"}]
    turns += [{"role": "assistant", "content": "x"}, {"role": "user", "content": "r"}]
    build_prompts([({"messages": turns}, "data.jsonl:1")], letters(named), max_prompt_tokens=99)
    assert "leaves out the text of a message of the role 'developer'" in caplog.text


def test_a_text_that_the_template_rewrites_is_not_left_out(caplog: pytest.LogCaptureFixture) -> None:
    chat_text_module._WARNED_OF.clear()
    as_json = TWO_ROLES.replace("m.content | trim", "m.content | tojson")  # as Llama 3.1 writes the answers of tools
    for template in (TWO_ROLES, as_json):
        for text in (" q ", 'say "no" or "yes"', "?!", "   "):
            record = {"messages": [{"role": "user", "content": text}]}
            assert build_prompts([(record, "data.jsonl:1")], letters(template), max_prompt_tokens=99)
    build({"prompt": "q", "response": " x "}, letters(TWO_ROLES))
    tagged = TWO_ROLES.replace("{{ m.content | trim }}", "{{ m.content.split('</thought>')[-1] }}")
    assert build({"prompt": "q", "response": "<thought>why</thought>x"}, letters(tagged)) == "u:q;a:[x;</s>]"
    drops = TWO_ROLES.replace("{{ m.content | trim }}", "{{ m.content.split('</think>')[-1] }}")
    assert build({"prompt": "q", "response": "<think>why</think>x"}, letters(drops)) == "u:q;a:[x;</s>]"
    assert "leaves out" not in caplog.text


def test_an_answer_that_the_template_leaves_out_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """As do templates that read a list of parts, and nothing from a text."""
    chat_text_module._WARNED_OF.clear()
    parts = TWO_ROLES.replace("{{ m.content | trim }}", "{% for p in m.content %}{{ p.text }}{% endfor %}")
    assert build({"prompt": "q", "response": "yes"}, letters(parts)) == "u:;a:[;</s>]"
    assert "data.jsonl:1: the chat template leaves out the answer 'yes', so it is not learned" in caplog.text
    assert "leaves out the text of a message of the role 'user'" in caplog.text
