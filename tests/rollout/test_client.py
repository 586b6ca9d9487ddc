"""What an episode is given: room, seeds, and the tokens of a message in a chat."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

import lightrl.models.chat_text as chat_text_module
from lightrl.builtin.model import builtin_tokenizer
from lightrl.engines.base import Completion, EnginePrompt, SamplingParams
from lightrl.rollout.client import EngineClient, EpisodeLimits, text_behind_answer
from lightrl.rollout.episode import Episode, Turn

CHATML = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}<eos>+{% endfor %}{% if add_generation_prompt %}<assistant>"
    "{% endif %}"
)


class Recorder:
    """Answers every request with token 5 and remembers its parameters."""

    def __init__(self) -> None:
        self.engine = SimpleNamespace(version=3, engine=SimpleNamespace(vocab_size=14))
        self.asked: list[SamplingParams] = []

    async def generate(self, prompt: EnginePrompt, params: SamplingParams) -> Completion:
        self.asked.append(params)
        return Completion(
            request_id=0,
            sample_index=params.first_sample,
            prompt_token_ids=prompt.token_ids,
            output_token_ids=(5,),
            logprobs=(-0.5,),
            versions=(3,),
            finish_reason="length",
        )


def client(recorder: Recorder, sample_index: int = 2, **limits: int) -> EngineClient:
    settings = {"max_new_tokens": 8, "max_turns": 4, "max_tokens": 20, **limits}
    return EngineClient(
        recorder,  # type: ignore[arg-type]
        builtin_tokenizer(),
        seed=11,
        sample_index=sample_index,
        sampling=SamplingParams(temperature=0.5, stop=("=",)),
        limits=EpisodeLimits(**settings),
    )


def test_a_turn_has_room_up_to_both_limits() -> None:
    recorder = Recorder()
    mine = client(recorder)
    assert [mine.room([1] * length) for length in (3, 12, 15, 20, 25)] == [8, 8, 5, 0, -5]
    asyncio.run(mine.generate([1] * 15))
    asyncio.run(mine.generate([1] * 15, max_new_tokens=2))
    assert [params.max_new_tokens for params in recorder.asked] == [5, 2]
    with pytest.raises(ValueError, match="no room for a turn behind 20 tokens: an episode may have 20"):
        asyncio.run(mine.generate([1] * 20))


def test_a_turn_is_generated_from_tokens() -> None:
    with pytest.raises(ValueError, match=r"generate\(\) takes the ids of tokens, not the text '1\+1='"):
        asyncio.run(client(Recorder()).generate("1+1="))  # type: ignore[arg-type]


def test_a_turn_ends_at_stop_strings_of_the_run_and_of_the_call() -> None:
    recorder = Recorder()
    asyncio.run(client(recorder).generate([1], stop=("</tool>", "+"), stop_token_ids=[2]))
    assert recorder.asked[0].stop == ("=", "</tool>", "+")
    assert recorder.asked[0].stop_token_ids == (2, 12)  # "+" is one token, at which an engine can end at once
    asyncio.run(client(recorder).generate([1], stop="</tool>"))  # its characters are no stop strings
    assert recorder.asked[1].stop == ("=", "</tool>")


def test_a_stop_token_does_not_end_a_turn_before_its_minimum() -> None:
    recorder = Recorder()
    mine = client(recorder)
    mine._sampling = replace(mine._sampling, min_new_tokens=2)
    asyncio.run(mine.generate([1], stop="+"))
    assert (recorder.asked[0].stop, recorder.asked[0].stop_token_ids) == (("=", "+"), ())


def test_calls_draw_apart_and_samples_by_their_index() -> None:
    recorder = Recorder()
    first, second = client(recorder), client(recorder, sample_index=3)
    for mine in (first, first, second, second):
        asyncio.run(mine.generate([1]))
    seeds = [params.seed for params in recorder.asked]
    assert seeds[0] == 11  # the seed of the plain run
    assert len(set(seeds)) == 2
    assert seeds[:2] == seeds[2:]  # of one prompt, so that siblings can share a request
    assert [params.first_sample for params in recorder.asked] == [2, 2, 3, 3]
    assert {params.temperature for params in recorder.asked} == {0.5}


def test_only_turns_of_the_runs_temperature_are_trainable() -> None:
    mine = client(Recorder())
    assert asyncio.run(mine.generate([1])).is_trainable
    greedy = asyncio.run(mine.generate([1], temperature=0.0))
    assert not greedy.is_trainable
    assert greedy.text == "3"  # token 5 of <pad> <eos> 0 1 2 3
    assert mine.version == 3


def test_a_turn_of_another_adapter_is_somebody_elses() -> None:
    recorder = Recorder()
    mine = client(recorder)
    turn = asyncio.run(mine.generate([1], adapter="opponent"))
    assert recorder.asked[0].adapter == "opponent"
    assert not turn.is_trainable
    with pytest.raises(ValueError, match="or of another adapter than the policy's, cannot be trained"):
        Episode([1]).say(turn)
    asyncio.run(mine.generate([1]))
    assert recorder.asked[1].adapter == "policy"


def said(*ids: int, finish_reason: Any = "stop") -> Turn:
    count = len(ids)
    return Turn(token_ids=ids, logprobs=(0.0,) * count, versions=(0,) * count, finish_reason=finish_reason, text="")


def test_a_reply_without_a_template_is_its_text() -> None:
    assert client(Recorder()).encode_reply("1+2=", after=said(4, 1)) == [3, 12, 4, 13]


class ChatTokenizer:
    """Characters as tokens, and a template of its own."""

    def __init__(self, template: str) -> None:
        self.chat_template = template

    def apply_chat_template(self, messages: list[dict[str, str]], **settings: Any) -> str:
        from jinja2 import Template

        del settings["tokenize"]
        return Template(self.chat_template).render(messages=messages, **settings)

    def __call__(self, text: str, add_special_tokens: bool) -> dict[str, list[int]]:
        assert not add_special_tokens
        return {"input_ids": [ord(character) for character in text]}

    def decode(self, ids: Any, skip_special_tokens: bool) -> str:
        return "<eos>" if list(ids) == [1] else "".join(map(chr, ids))


def test_an_unknown_character_is_named_beside_the_known_ones() -> None:
    with pytest.raises(
        ValueError, match="a text of an episode: .* cannot read the text 'Hot!'.* it knows only .* 9"
    ) as caught:
        client(Recorder()).encode("Hot!")
    assert caught.value.__suppress_context__  # else an episode's traceback shows the library's, too


def text_of(template: str, after: Turn) -> str:
    mine = client(Recorder())
    mine.tokenizer = ChatTokenizer(template)
    return "".join(map(chr, mine.encode_reply("why?", after=after)))


def test_a_reply_in_a_chat_is_what_the_template_puts_behind_an_answer() -> None:
    # An answer that ended by <eos> has it already; one that was cut off has not.
    assert text_of(CHATML, said(7, 1)) == "+<user>why?<eos>+<assistant>"
    assert text_of(CHATML, said(7, finish_reason="length")) == "<eos>+<user>why?<eos>+<assistant>"


def test_odd_messages_and_named_templates_continue_a_chat_too() -> None:
    mine = client(Recorder())
    mine.tokenizer = ChatTokenizer(CHATML)
    behind = [mine.encode_messages(messages, after=said(7, 1)) for messages in ([], [{"content": "why?"}])]
    assert ["".join(map(chr, ids)) for ids in behind] == ["+<assistant>", "+<>why?<eos>+<assistant>"]

    named = builtin_tokenizer()  # as those of Hermes 3 and Command R
    named.chat_template = {"default": CHATML, "tool_use": "{{ tools }}"}
    answer = {"role": "tool", "content": "3"}
    assert text_behind_answer(named, [answer]) == "<eos>+<tool>3<eos>+<assistant>"


def test_a_reply_that_the_template_leaves_out_is_told(caplog: pytest.LogCaptureFixture) -> None:
    mine = client(Recorder())
    mine.tokenizer = ChatTokenizer(CHATML.replace("in messages", "in messages if m.role != 'tool'"))
    told = "an episode: the chat template leaves out the text of a message of the role 'tool'"
    chat_text_module._WARNED_OF.clear()
    for _ in range(2):
        heard = mine.encode_reply("why?", role="tool", after=said(7, 1))
        assert "".join(map(chr, heard)) == "+<assistant>"
    assert caplog.text.count(told) == 1
    chat_text_module._WARNED_OF.clear()
    mine.encode_prompt([{"role": "user", "content": "q"}, {"role": "tool", "content": "why?"}], tools=[])
    assert caplog.text.count(told) == 2


def test_a_template_that_drops_answers_is_refused() -> None:
    with pytest.raises(ValueError, match="chat template leaves an answer out"):
        text_of("{{ messages[-1].content }}", said(7, 1))


# ---- Three kinds of chat template ------------------------------------------------------------------------------------

MARKED = (  # a mark before and behind each message, and a line break that no turn of the policy has
    "{% if tools %}<|im_start|>system\n{{ tools | length }} tools<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<eos>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
HEADED = (  # a header for each message, whose text is trimmed
    "<|begin|>{% for m in messages %}<|header|>{{ m.role }}<|end|>\n\n{{ m.content | trim }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<|header|>assistant<|end|>\n\n{% endif %}"
)
BRACKETED = (  # the user's text in brackets, nothing before an answer
    "<s>{% for m in messages %}{% if m.role == 'assistant' %} {{ m.content }}<eos>{% else %}[INST] {{ m.content }} "
    "[/INST]{% endif %}{% endfor %}"
)


@pytest.mark.parametrize("template", [MARKED, HEADED, BRACKETED], ids=["marked", "headed", "bracketed"])
def test_a_conversation_grows_as_the_template_writes_it(template: str) -> None:
    """100 random dialogues: the tokens of a turn are a prefix of the next one's, and their text is the template's."""
    draw = random.Random(7)
    mine = client(Recorder(), max_tokens=10**6)
    mine.tokenizer = ChatTokenizer(template)

    def words() -> str:
        return " ".join(draw.choice(["why", "so", "x=3", "no\nyes", "{1}", "no."]) for _ in range(draw.randint(1, 6)))

    for _ in range(100):
        messages = [{"role": "user", "content": words()}]
        text = mine.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        episode = Episode(mine.encode(text))
        for _ in range(draw.randint(1, 5)):
            before = episode.ids
            # Behind "[/INST]" this template puts a space before an answer: it is the policy's to say.
            space = " " if template is BRACKETED else ""
            answer = words()
            episode.say(said(*map(ord, space + answer), 1))
            messages.append({"role": "assistant", "content": answer})
            messages.append({"role": "user", "content": words()})
            turn = said(*map(ord, space + answer), 1)
            episode.hear(mine.encode_messages(messages[-1:], after=turn))
            assert episode.ids[: len(before)] == before
            shown = "".join("<eos>" if token == 1 else chr(token) for token in episode.ids)
            assert shown == mine.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)


def test_a_turn_that_was_tokenised_again_is_caught() -> None:
    """Its text is the same, and its tokens are not: 12 was said as one token, and is read as two."""
    mine = client(Recorder())
    episode = Episode([3, 4])
    episode.say(asyncio.run(mine.generate(episode.ids)))
    again = asyncio.run(mine.generate([3, 4, 6]))
    with pytest.raises(ValueError, match="token 2 was 6 there and is 5 here. Text that is tokenised again"):
        episode.say(again)
