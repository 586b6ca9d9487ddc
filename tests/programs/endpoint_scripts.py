"""A scripted engine with a tokenizer whose texts have several tokenisations, and agents that talk to it at random."""

import asyncio
import hashlib
import itertools
import json
import random
from collections import Counter

from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from lightrl.engines.base import Completion, SamplingParams
from lightrl.records import Prompt
from lightrl.rollout.client import EngineClient, EpisodeLimits
from lightrl.rollout.endpoint.requests import chat_answer, chat_wish, token_wish
from lightrl.rollout.endpoint.session import Session

TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TOOLS = [{"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}}]


def ambiguous_tokenizer():
    """Every word of one to three of a, b, c and blank is a token, so that a text has many tokenisations."""
    words = ["".join(item) for size in (1, 2, 3) for item in itertools.product("abc ", repeat=size)]
    characters = sorted({chr(code) for code in range(32, 127)} | {"\n"})
    vocabulary = {word: index for index, word in enumerate(dict.fromkeys([*words, *characters]))}
    merges = [(word[:size], word[size:]) for word in words for size in range(1, len(word))]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken("<|im_start|>"), AddedToken("<|im_end|>")])
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", clean_up_tokenization_spaces=False
    )
    made.chat_template = TEMPLATE
    return made


class ScriptedDriver:
    """Answers after a few turns of the loop with tokens that depend on the prompt and the seed, and logs them."""

    def __init__(self, tokenizer, num_words=84):
        self.engine = self
        self.version = 3
        self.is_over = False
        self.adapters, self.vocab_size = ("policy",), len(tokenizer)
        self.log = []  # (prompt, output, logprobs) of the policy
        self.others = []  # parameters of requests to other adapters
        self._tokenizer, self._num_words = tokenizer, num_words
        self._call = tokenizer('<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>')["input_ids"]

    async def generate(self, prompt, params):
        key = repr((prompt.token_ids, params.seed, params.first_sample))
        rng = random.Random(hashlib.sha256(key.encode()).digest())
        for _ in range(rng.randrange(4)):
            await asyncio.sleep(0)
        ids = [rng.randrange(self._num_words) for _ in range(rng.randrange(1, 7))]
        if rng.random() < 0.2:
            ids += self._call
        reason = "length" if rng.random() < 0.2 else "stop"
        if reason == "stop":
            ids.append(self._tokenizer.eos_token_id)
        ids = tuple(ids[: params.max_new_tokens])
        logprobs = tuple(-rng.random() for _ in ids)
        if params.adapter == "policy":
            self.log.append((prompt.token_ids, ids, logprobs))
        else:
            self.others.append(params)
        return Completion(
            request_id=len(self.log),
            sample_index=params.first_sample,
            prompt_token_ids=prompt.token_ids,
            output_token_ids=ids,
            logprobs=logprobs,
            versions=(3,) * len(ids),
            finish_reason=reason if len(ids) < params.max_new_tokens else "length",
        )


def client_of(driver, tokenizer, *, sample_index=0, max_tokens=4096, max_turns=64):
    limits = EpisodeLimits(max_new_tokens=64, max_turns=max_turns, max_tokens=max_tokens)
    return EngineClient(driver, tokenizer, seed=5, sample_index=sample_index, sampling=SamplingParams(), limits=limits)


def task_of(tokenizer, text="ab c?"):
    messages = ({"role": "user", "content": text},)
    rendered = tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
    return Prompt(index=0, text=rendered, token_ids=tuple(tokenizer(rendered)["input_ids"]), messages=messages)


class RandomAgent:
    """Talks through chat(body) and complete(body), which return parsed answers: forks, retries, edits, sends again.

    A branch is the messages so far and the number of the answer that they go on from (None: of none).
    """

    def __init__(self, rng, chat, complete):
        self._rng, self._chat, self._complete = rng, chat, complete
        self._count = itertools.count()
        self.parents = []  # of each answer, in the order in which they came: the answer that it should go on from

    async def run(self, num_calls=6):
        rng = self._rng
        branches = [([{"role": "user", "content": "ab c?"}], None, [])]
        if rng.random() < 0.3:  # a second conversation of the same agent
            branches.append(([{"role": "system", "content": "b"}, {"role": "user", "content": "cab"}], None, TOOLS))
        while len(self.parents) < num_calls:
            messages, parent, tools = branches[rng.randrange(len(branches))]
            body = {"messages": self._resent(messages), "n": rng.choice([1, 1, 1, 2]), "return_token_ids": True}
            answer = await self._chat(json.loads(json.dumps({**body, "tools": tools} if tools else body)))
            for choice in answer["choices"]:
                number = len(self.parents)
                self.parents.append(parent)
                branches.append(self._continued(messages, choice["message"], (parent, number), tools))
            if rng.random() < 0.2:
                ids = [*answer["prompt_token_ids"], *answer["choices"][-1]["token_ids"], 3, 4]
                await self._complete({"token_ids": ids, "sampling_params": {}})
                self.parents.append(len(self.parents) - 1)
            if rng.random() < 0.6:  # mostly the newest goes on, so that conversations become long
                branches = branches[-2:]

    def _continued(self, messages, message, numbers, tools):
        rng = self._rng
        said, (parent, number) = dict(message), numbers
        if rng.random() < 0.1:  # an edited answer is no answer of the policy: it goes on from the one before
            edited = {"role": "assistant", "content": f"edited {next(self._count)}"}
            return [*messages, edited, {"role": "user", "content": "a"}], parent, tools
        follow = [{"role": "user", "content": rng.choice(["ba", "c", "a b"]) + str(next(self._count))}]
        if said.get("tool_calls"):
            follow = [
                {"role": "tool", "tool_call_id": call["id"], "content": rng.choice(["7", "abc", ""])}
                for call in said["tool_calls"]
            ]
        return [*messages, said, *follow], number, tools

    def _resent(self, messages):
        """Writes the messages as one client or another does."""
        style = self._rng.randrange(4)
        return [self._in_style(message, style) for message in messages]

    def _in_style(self, message, style):
        message = {name: value for name, value in message.items() if value is not None or style == 0}
        if style == 1 and isinstance(message.get("content"), str):
            message["content"] = [{"type": "text", "text": message["content"]}]
        if style == 2 and message["role"] == "assistant" and message.get("content"):
            message["content"] = message["content"].strip()
        if style == 3 and message.get("tool_calls"):
            calls = [{**call, "function": dict(call["function"])} for call in message["tool_calls"]]
            for call in calls:
                call["function"]["arguments"] = json.dumps(json.loads(call["function"]["arguments"]), indent=1)
            message["tool_calls"] = calls
        return message


def session_callers(session, tokenizer):
    """Returns chat(body) and complete(body) of a session, with requests and answers as they are on the wire."""

    async def chat(body):
        replies = await session.chat(*chat_wish(body))
        return json.loads(json.dumps(chat_answer(replies, body, "policy", tokenizer)))

    async def complete(body):
        await session.complete(*token_wish(body))

    return chat, complete


def trained_turns(episodes):
    """Returns (context, tokens, logprobs) of every turn that is trained."""
    turns = []
    for episode in episodes:
        sample = episode.sample(Prompt(index=0, text="", token_ids=(1,)), 0, 0, TOKENIZER)
        starts = sample.turns
        for start, end in zip(starts, [*starts[1:], len(sample.response_ids)], strict=True):
            own = [index for index in range(start, end) if sample.is_own[index]]
            assert own == list(range(start, start + len(own)))
            context = sample.prompt_ids + sample.response_ids[:start]
            ids = sample.response_ids[start : start + len(own)]
            turns.append((context, ids, sample.sampler_logprobs[start : start + len(own)]))
    return turns


async def converse(seed, tokenizer, num_calls=6):
    """Runs one random agent; returns (calls, samples, calls whose predecessor was recognised wrongly)."""
    driver = ScriptedDriver(tokenizer)
    session = Session(client_of(driver, tokenizer), asyncio.get_running_loop(), task_of(tokenizer), wait_s=1)
    agent = RandomAgent(random.Random(seed), *session_callers(session, tokenizer))
    await agent.run(num_calls)
    episodes = session.episodes()
    assert Counter(trained_turns(episodes)) == Counter(driver.log), seed
    calls = session.conversations.calls
    found = [None if call.parent is None else calls.index(call.parent) for call in calls]
    wrong = [
        (number, index, expected)
        for number, (index, expected) in enumerate(zip(found, agent.parents, strict=True))
        if index != expected and not _look_alike(calls, index, expected)
    ]
    return len(calls), len(episodes), wrong


def _look_alike(calls, *numbers):
    """Whether two answers to one prompt have the same text, so that a client's history cannot tell them apart."""
    if None in numbers:
        return False
    first, second = (calls[number] for number in numbers)
    return first.prompt_ids == second.prompt_ids and first.turn.text.strip() == second.turn.text.strip()


TOKENIZER = ambiguous_tokenizer()
