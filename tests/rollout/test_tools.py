"""Calls of tools: what the policy reads of them, in the order of the calls, and what happens to bad ones."""

from __future__ import annotations

import asyncio
import importlib
import json
import re
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from jinja2.exceptions import TemplateError
from PIL import Image
from test_client import ChatTokenizer, client
from tiny_vlm import tiny_media

from lightrl.engines.base import Completion, EnginePrompt, SamplingParams
from lightrl.records import Prompt
from lightrl.rollout.episode import Episode
from lightrl.rollout.tools import ToolWorkflow
from lightrl.rollout.written_calls import ToolCall

HERE = f"{__name__}:"
_MET: list[str] = []  # what the calls of meet() were given
PROMPT = Prompt(index=0, text="", token_ids=(9,), messages=({"role": "user", "content": "6 x 7?"},))
TEMPLATE = (
    "{% for tool in tools or [] %}[{{ tool.function.name }}]{% endfor %}{% for m in messages %}<{{ m.role }}>"
    "{{ m.content }}<eos>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


MISTRAL = (  # as of v3: it demands the ids of calls
    "{% for m in messages %}{% if m.role == 'user' %}[INST]{{ m.content }}[/INST]{% elif m.role == 'tool' %}"
    "{% if m.tool_call_id is not defined or m.tool_call_id | length != 9 %}"
    "{{ raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}{% endif %}"
    '[TOOL_RESULTS]{"content": {{ m.content }}, "call_id": "{{ m.tool_call_id }}"}[/TOOL_RESULTS]'
    "{% else %}{{ m.content }}<eos>{% endif %}{% endfor %}"
)
HERMES = (  # it demands the names of the tools
    "{% for m in messages %}<{{ m.role }}>{% if m.role == 'tool' %}{% if m.name is not defined %}"
    "{{ raise_exception(\"Tool response dicts require a 'name' key\") }}{% endif %}{{ m.name }}: {% endif %}"
    "{{ m.content }}<eos>{% endfor %}<assistant>"
)
GEMMA = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}<eos>{% endfor %}"
)


BEHIND_CALLS = (  # as those of gpt-oss and Gemma 4: an answer stands only behind the call that it answers
    "{% set calls = namespace(names={}) %}{% for m in messages %}{% if m.role == 'tool' %}"
    "{% if m.tool_call_id not in calls.names %}{{ raise_exception('a tool message without a call!') }}{% endif %}"
    "<{{ calls.names[m.tool_call_id] }}>{{ m.content }}|{% elif m.tool_calls %}<{{ m.role }}>{{ m.content }}"
    "{% for c in m.tool_calls %}{% set _ = calls.names.update({c.id: c.function.name}) %}"
    "CALL {{ c.function.name }}{{ c.function.arguments }};{% endfor %}<eos>{% else %}<{{ m.role }}>{{ m.content }}<eos>"
    "{% endif %}{% endfor %}{% if add_generation_prompt and messages[-1].role != 'tool' %}<assistant>{% endif %}"
)


class RaisingTokenizer(ChatTokenizer):
    """Gives its template the function by which those of models refuse a conversation."""

    def apply_chat_template(self, messages: list[dict[str, str]], **settings: Any) -> str:
        def refuse(message: str) -> None:
            raise TemplateError(message)

        return super().apply_chat_template(messages, raise_exception=refuse, **settings)

    def __call__(self, text: str, add_special_tokens: bool) -> dict[str, list[int]]:
        return super().__call__(text.replace("<eos>", chr(1)), add_special_tokens)


def times(a: int, b: int) -> int:
    """
    Multiplies two numbers.

    Args:
        a: the first
        b: the second
    """
    return a * b


async def slow(text: str) -> str:
    """
    Takes its time.

    Args:
        text: is returned
    """
    await asyncio.sleep(0.05)
    return text


async def meet(text: str) -> str:
    """
    Waits for another call of itself.

    Args:
        text: is returned
    """
    _MET.append(text)
    for _ in range(500):
        if len(_MET) == 2:
            return text
        await asyncio.sleep(0.01)
    return "alone"


def draw(title: str) -> Any:
    """
    Shows an image.

    Args:
        title: stands above the image, if it is no empty text
    """
    words = ["Here it is:", title] if title else []
    return [*({"type": "text", "text": word} for word in words), {"type": "image", "image": Image.new("RGB", (2, 2))}]


def stuck() -> str:
    """Never answers in time."""
    time.sleep(0.4)
    return "too late"


def by_place(first: int, /, *others: int) -> int:
    """Adds.

    Args:
        first: A number.
        others: More numbers.
    """
    return first + sum(others)


def undescribed(a):  # type: ignore[no-untyped-def]
    return a


class Script:
    """Says the turns of a script, each ended by <eos>."""

    def __init__(self, *turns: str) -> None:
        self._turns = iter(turns)

    async def generate(self, prompt: EnginePrompt, params: SamplingParams) -> Completion:
        ids = (*map(ord, next(self._turns)), 1)
        return Completion(
            request_id=0,
            sample_index=0,
            prompt_token_ids=prompt.token_ids,
            output_token_ids=ids,
            logprobs=(0.0,) * len(ids),
            versions=(0,) * len(ids),
            finish_reason="stop",
        )


def play(
    *turns: str,
    tools: Any = (HERE + "times", HERE + "slow"),
    template: str = TEMPLATE,
    max_tokens: int = 10_000,
    **settings: Any,
) -> tuple[str, Episode]:
    engine = client(Script(*turns), max_tokens=max_tokens, max_new_tokens=100)  # type: ignore[arg-type]
    engine.tokenizer = RaisingTokenizer(template)
    episode = asyncio.run(ToolWorkflow(tools=tools, **settings).arun_episode(engine, PROMPT))
    text = "".join("<eos>" if token == 1 else chr(token) for token in episode.ids)
    return text, episode


def call(name: str, arguments: str) -> str:
    return f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>'


def test_a_result_is_read_and_the_last_turn_is_the_answer() -> None:
    first = "I ask. " + call("times", '{"a": 6, "b": 7}')
    text, episode = play(first, "42")
    assert text == f"[times][slow]<user>6 x 7?<eos><assistant>{first}<eos><tool>42<eos><assistant>42<eos>"
    own = "".join(
        chr(token) if token != 1 else "<eos>"
        for token, is_own in zip(episode.response_ids, episode._own, strict=True)
        if is_own
    )
    assert own == f"{first}<eos>42<eos>"
    assert episode.numbers == {"tool_calls": 1, "tool_errors": 0}
    assert episode.finish_reason == "stop"


def test_an_episode_ends_before_an_answer_that_leaves_no_room_for_a_turn() -> None:
    first, answer = call("times", '{"a": 6, "b": 7}'), "<tool>42.<assistant>"  # . stands for <eos>, one token
    _, episode = play(first, "42")
    before = len(episode.prompt_ids) + len(first) + 1
    for room, reason in ((len(answer), "context"), (len(answer) + 1, "stop")):
        _, episode = play(first, "42", max_tokens=before + room)
        assert (episode.finish_reason, len(episode.turns)) == (reason, 1 + (reason == "stop"))


def test_the_page_gives_each_episode_a_basket_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[2] / "docs" / "rollouts.md").read_text()
    (code,) = (block.partition("```")[0] for block in page.split("```python\n") if "class Shop" in block)
    (tmp_path / "page_shop.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    shop: ToolWorkflow = importlib.import_module("page_shop").Shop()

    async def buy(*items: str) -> Episode:
        turns = [call("add", json.dumps({"item": item})) for item in items]
        engine = client(Script(*turns, "done"), max_tokens=10_000, max_new_tokens=100)  # type: ignore[arg-type]
        engine.tokenizer = RaisingTokenizer(TEMPLATE)
        return await shop.arun_episode(engine, replace(PROMPT, fields={"wanted": ["tea", "milk"]}))

    async def both() -> list[Episode]:
        return await asyncio.gather(buy("tea", "milk"), buy("tea"))

    right, wrong = asyncio.run(both())
    assert (right.reward, wrong.reward) == (1.0, 0.0)
    assert "<tool>2 items<eos>" in "".join(map(chr, right.ids)).replace(chr(1), "<eos>")


def test_a_model_of_text_alone_reads_the_text_beside_an_image(caplog: pytest.LogCaptureFixture) -> None:
    said = call("draw", '{"title": "Red"}')
    text, _ = play(said, said, "42", tools=HERE + "draw")
    assert text.count("<tool>Here it is:\nRed<eos>") == 2
    assert [record.message for record in caplog.records] == [
        "A tool shows images beside its text. The model takes none, so it reads the text alone."
    ]
    with pytest.raises(ValueError, match="An observation shows an image, and the model takes none"):
        play(call("draw", '{"title": ""}'), "42", tools=HERE + "draw")


def show(height: int) -> Any:
    """
    Shows a line.

    Args:
        height: of the image in pixels
    """
    return Image.new("RGB", (2, height))


def test_an_image_that_the_model_cannot_take_is_an_error_that_the_policy_reads() -> None:
    """The image processor of Qwen refuses an image that is narrower than 1:200."""
    workflow, episode = ToolWorkflow(tools=HERE + "show"), Episode([9])
    engine: Any = SimpleNamespace(media=tiny_media("qwen2_5_vl"))
    calls = [ToolCall("show", {"height": height}) for height in (600, 60)]
    thin, fine = asyncio.run(workflow._answers(calls, episode, engine))
    assert thin["content"].startswith("error: the model cannot take the image: absolute aspect ratio must be smaller")
    assert [part["type"] for part in fine["content"]] == ["image"]
    assert episode.numbers == {"tool_calls": 2, "tool_errors": 1}


def test_calls_of_one_turn_run_side_by_side_and_are_answered_in_order() -> None:
    _MET.clear()
    calls = call("meet", '{"text": "a"}') + call("meet", '{"text": "b"}') + call("times", '{"a": 2, "b": 2}')
    text, episode = play(calls, "done", tools=(HERE + "meet", HERE + "times"))
    assert "<tool>a<eos><tool>b<eos><tool>4<eos><assistant>done" in text
    assert episode.numbers["tool_calls"] == 3


@pytest.mark.parametrize(
    ("said", "answer"),
    [
        ("<tool_call>{oops</tool_call>", "error: this call cannot be made: {oops (JSONDecodeError"),
        ("<tool_call>[1]</tool_call>", "error: this call cannot be made: [1] (TypeError"),
        (call("divide", "{}"), "error: there is no tool 'divide'. The tools are times, slow."),
        (call("times", '{"a": 1}'), "(TypeError: missing a required argument: 'b')"),
        (call("times", '{"a": "x", "b": "y"}'), "error: TypeError: can't multiply sequence"),
        ("<tool_call>" + "[" * 3_000 + "</tool_call>", "error: this call cannot be made"),
    ],
)
def test_a_bad_call_is_answered_by_its_error(said: str, answer: str) -> None:
    text, episode = play(said, "42")
    assert answer in text.partition("<tool>")[2]
    assert episode.numbers == {"tool_calls": 1, "tool_errors": 1}


def test_an_answer_has_the_id_and_the_name_that_templates_demand() -> None:
    """Without them the templates of Mistral and Hermes fail every episode at its first call."""
    twice = call("times", '{"a": 2, "b": 2}') + call("divide", "{}")
    text, _ = play(twice, call("times", '{"a": 6, "b": 7}'), "42", template=MISTRAL)
    ids = ["000000000", "000000001", "000000002"]
    assert re.findall('"call_id": "(.*?)"', text) == ids
    assert f'[TOOL_RESULTS]{{"content": 42, "call_id": "{ids[2]}"}}[/TOOL_RESULTS]42<eos>' in text
    text, _ = play(twice, "4", template=HERMES)
    assert "<tool>times: 4<eos><tool>tool: error: there is no tool 'divide'" in text  # no name that the policy made up


def test_a_template_that_renders_answers_only_behind_their_calls_gets_calls() -> None:
    workflow = ToolWorkflow(tools=HERE + "times")
    workflow.check(RaisingTokenizer(BEHIND_CALLS))
    first = call("times", '{"a": 6, "b": 7}')
    text, _ = play(first, "42", template=BEHIND_CALLS)
    assert text == f"<user>6 x 7?<eos><assistant>{first}<eos><times>42|42<eos>"
    text, _ = play(first + call("slow", '{"text": "b"}'), "42", template=BEHIND_CALLS)
    assert text.endswith("<eos><times>42|<slow>b|42<eos>")


def test_a_template_that_refuses_the_answers_of_tools_is_refused_before_the_run() -> None:
    workflow = ToolWorkflow(tools=HERE + "times")
    for taken in (TEMPLATE, MISTRAL, HERMES):
        workflow.check(RaisingTokenizer(taken))
    with pytest.raises(ValueError, match=r'"Conversation roles must alternate .*"\. Use .*chat_template_file'):
        workflow.check(RaisingTokenizer(GEMMA))
    with pytest.raises(ValueError, match="leaves out the answer to a tool call"):
        workflow.check(RaisingTokenizer("{% for m in messages if m.role != 'tool' %}{{ m.content }}{% endfor %}"))


@pytest.mark.parametrize(
    ("template", "warning"),
    [
        (TEMPLATE, ""),
        (MISTRAL, ""),
        (HERMES, ""),
        (
            TEMPLATE.replace("m.content }}", "m.content if m.role != 'tool' or loop.last }}"),
            "leaves out the answers if a turn calls several tools. Use",
        ),
        (
            TEMPLATE.replace(
                "messages %}<",
                "messages %}{% if m.role == 'tool' and not loop.last %}{{ raise_exception('one call!') }}{% endif %}<",
            ),
            'refuses the answers if a turn calls several tools: "one call!". Use',
        ),
    ],
)
def test_a_template_that_takes_one_answer_alone_is_warned_of(
    template: str, warning: str, caplog: pytest.LogCaptureFixture
) -> None:
    ToolWorkflow(tools=HERE + "times").check(RaisingTokenizer(template))
    told = [text for text in caplog.messages if "leaves the tools out" not in text]
    assert [warning in text for text in told] == [True] * bool(warning)


def test_a_tool_that_is_late_is_answered_for() -> None:
    text, _ = play(call("stuck", "{}"), "42", tools=HERE + "stuck", timeout_s=0.05)
    assert "<tool>error: no result after 0.05 s<eos>" in text


def test_a_long_result_is_cut() -> None:
    text, _ = play(call("slow", '{"text": "' + "x" * 50 + '"}'), "42", max_result_chars=10)
    assert f"<tool>{'x' * 10}<eos>" in text


def test_limits_end_the_episode() -> None:
    again = call("times", '{"a": 1, "b": 1}')
    _, episode = play(*[again] * 4)
    assert len(episode.turns) == 4  # max_turns
    assert episode.finish_reason == "turns"


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"tools": HERE + "undescribed"}, r"cannot be described to the policy: .*[^.!]\. Give it a docstring"),
        ({"tools": HERE + "by_place"}, "by_place' takes first, others by position, and a call gives every argument by"),
        ({"tools": HERE + "Script"}, "Script' is <class .*Script'>. A tool is a function: for a class"),
        ({"tools": ()}, "give at least one function"),
        ({"tools": (HERE + "times", HERE + "times")}, "each name once"),
        ({"tools": HERE + "times", "timeout_s": 0}, "both must be above 0"),
        ({"tools": HERE + "times", "parser": "yaml"}, "Unknown parser 'yaml'. Choose one of hermes, json, .*, glm"),
    ],
)
def test_tools_that_cannot_be_used_are_refused(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        ToolWorkflow(**settings)


def test_a_tokenizer_without_a_chat_template_is_refused() -> None:
    engine = client(Script("42"))  # type: ignore[arg-type]
    workflow = ToolWorkflow(tools=HERE + "times")
    with pytest.raises(ValueError, match="no chat template, which describes the tools"):
        workflow.check(engine.tokenizer)
    with pytest.raises(ValueError, match="no chat template, which describes the tools"):
        asyncio.run(workflow.arun_episode(engine, PROMPT))


def test_a_template_that_leaves_the_tools_out_is_warned_of_on_one_rank(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    workflow = ToolWorkflow(tools=HERE + "times")
    workflow.check(ChatTokenizer(TEMPLATE))
    assert not caplog.records
    for rank in "012":
        monkeypatch.setenv("RANK", rank)
        workflow.check(ChatTokenizer(TEMPLATE.partition("{% endfor %}")[2]))
    (told,) = caplog.messages
    assert "the policy is not told of times" in told


class SkippingTokenizer(RaisingTokenizer):
    """Has the marks of Mistral's calls as special tokens."""

    def decode(self, ids: Any, skip_special_tokens: bool) -> str:
        text = super().decode(ids, skip_special_tokens)
        return re.sub(r"\[TOOL_CALLS\]|\[ARGS\]", "", text) if skip_special_tokens else text


def test_calls_that_special_tokens_mark_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{__name__}.RaisingTokenizer", SkippingTokenizer)
    written = '[TOOL_CALLS]times[ARGS]{"a": 6, "b": 7}'
    text, episode = play(written, "42", parser="mistral", template=MISTRAL)
    assert '{"content": 42, "call_id": "000000000"}' in text
    assert episode.numbers == {"tool_calls": 1, "tool_errors": 0}
    own = '[TOOL_CALLS][{"name": "times", "arguments": {"a": 6, "b": 7}, "id": "abc123def"}]'
    assert '{"content": 42, "call_id": "abc123def"}' in play(own, "42", parser="mistral", template=MISTRAL)[0]


def test_calls_may_be_json_or_a_python_block() -> None:
    text, episode = play('I ask {"name": "times", "parameters": {"a": 6, "b": 7}}', "42", parser="json")
    assert "<tool>42<eos><assistant>42" in text
    text, episode = play("```python\nprint(6 * 7)\n```", "42", tools="python", parser="python")
    assert "<tool>42\n<eos><assistant>42" in text
    assert episode.numbers == {"tool_calls": 1, "tool_errors": 0}
