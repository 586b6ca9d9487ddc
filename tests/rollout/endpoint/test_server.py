"""The endpoint over real HTTP: answers, refusals, clients that hang up, and OpenAI's own client."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import socket
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest
from endpoint_scripts import TOKENIZER, TOOLS, RandomAgent, ScriptedDriver, client_of, task_of, trained_turns

from lightrl.rollout.endpoint.errors import RequestError
from lightrl.rollout.endpoint.server import Endpoint, require_aiohttp
from lightrl.rollout.endpoint.session import Session, Wish

MOST_WAITING = Path("/proc/sys/net/core/somaxconn")
Play = Callable[[aiohttp.ClientSession, str, str], Awaitable[Any]]


@pytest.fixture(scope="module")
def endpoint() -> Iterator[Endpoint]:
    made = Endpoint(wait_s=0.2, max_body_mb=0.05)
    made.start()
    yield made
    made.stop()


def play(endpoint: Endpoint, script: Play, driver: ScriptedDriver | None = None, **limits: int) -> Any:
    """Runs a script in an episode, in this thread's loop; the server is in its own."""
    driver = driver or ScriptedDriver(TOKENIZER)

    async def run() -> Any:
        key, session = endpoint.open(
            client_of(driver, TOKENIZER, **limits), task_of(TOKENIZER), asyncio.get_running_loop()
        )
        try:
            async with aiohttp.ClientSession(endpoint.origin, headers={"Authorization": f"Bearer {key}"}) as http:
                outcome = await asyncio.wait_for(script(http, key, endpoint.base_url), 300)
        finally:
            endpoint.close(key)
        assert Counter(trained_turns(session.episodes())) == Counter(driver.log)
        return outcome

    return asyncio.run(run())


async def post(http: aiohttp.ClientSession, path: str, body: Any, **changes: Any) -> tuple[int, Any]:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    async with http.post(path, data=data, **changes) as answer:
        return answer.status, await answer.json()


MESSAGES = [{"role": "user", "content": "ab c?"}]
CHAT = "/v1/chat/completions"
GIF = "data:image/gif;base64,R0lGODlhAQABAIAAAAAAAP///yH5BAEAAAAALAAAAAABAAEAAAIBRAA7"


def test_random_agents_over_http_train_the_engines_tokens(endpoint: Endpoint) -> None:
    import random

    for seed in range(6):

        async def script(http: aiohttp.ClientSession, key: str, base_url: str, seed: int = seed) -> None:
            async def chat(body: dict[str, Any]) -> Any:
                status, answer = await post(http, CHAT, body)
                assert status == 200, answer
                return answer

            async def complete(body: dict[str, Any]) -> None:
                status, answer = await post(http, "/inference/v1/generate", body)
                assert status == 200, answer
                [choice] = answer["choices"]
                assert choice["logprobs"]["content"][0]["token"] == f"token_id:{choice['token_ids'][0]}"
                assert choice["versions"] == [3] * len(choice["token_ids"])

            await RandomAgent(random.Random(seed), chat, complete).run()

        play(endpoint, script)


def test_openais_client_reads_answers_streams_and_errors(endpoint: Endpoint) -> None:
    async def script(http: aiohttp.ClientSession, key: str, base_url: str) -> None:
        client = openai.AsyncOpenAI(base_url=base_url, api_key=key, max_retries=0)
        answer = await client.chat.completions.create(
            model="policy", messages=MESSAGES, n=2, logprobs=True, max_tokens=3, temperature=1.0, stop="zz"
        )
        assert len(answer.choices) == 2
        assert answer.usage.completion_tokens == sum(len(choice.logprobs.content) for choice in answer.choices)
        assert {choice.finish_reason for choice in answer.choices} <= {"stop", "length"}
        again = [*MESSAGES, answer.choices[1].message, {"role": "user", "content": "a"}]
        stream = await client.chat.completions.create(
            model="policy", messages=again, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        assert chunks[0].choices[0].delta.role == "assistant"
        assert chunks[-2].choices[0].finish_reason
        assert chunks[-1].usage.total_tokens > 0
        assert [model.id async for model in client.models.list()] == ["policy"]
        with pytest.raises(openai.NotFoundError, match="The model 'gpt' does not exist. This endpoint serves 'policy'"):
            await client.chat.completions.create(model="gpt", messages=MESSAGES)
        with pytest.raises(openai.AuthenticationError, match="has ended"):
            await client.with_options(api_key="lightrl-episode-x").chat.completions.create(
                model="policy", messages=MESSAGES
            )
        with pytest.raises(openai.BadRequestError, match="maximum context length is 200 tokens") as error:
            await client.chat.completions.create(model="policy", messages=[{"role": "user", "content": "c?" * 200}])
        assert error.value.code == "context_length_exceeded"
        content = [{"type": "image_url", "image_url": {"url": GIF}}]
        with pytest.raises(openai.BadRequestError, match="have an image, and this model takes only text"):
            await client.chat.completions.create(model="policy", messages=[{"role": "user", "content": content}])
        await client.close()

    play(endpoint, script, max_tokens=200)


def test_tool_calls_are_read_in_the_notation_of_the_option() -> None:
    driver = ScriptedDriver(TOKENIZER)
    driver._call = TOKENIZER('<function=add>{"a": 1}</function>')["input_ids"]
    made = Endpoint(tool_parser="llama")
    made.start()

    async def script(http: aiohttp.ClientSession, key: str, base_url: str) -> None:
        client = openai.AsyncOpenAI(base_url=base_url, api_key=key, max_retries=0)
        asked: dict[str, Any] = {"model": "policy", "tools": TOOLS}
        calls, streamed = [], []
        for text in map(str, range(40)):
            asked["messages"] = [{"role": "user", "content": text}]
            calls += (await client.chat.completions.create(**asked)).choices[0].message.tool_calls or []
            async for chunk in await client.chat.completions.create(**asked, stream=True):
                streamed += chunk.choices[0].delta.tool_calls or []
        for found in (calls, streamed):
            assert found
            assert all((call.function.name, call.function.arguments) == ("add", '{"a": 1}') for call in found)
        await client.close()

    play(made, script, driver)
    made.stop()
    with pytest.raises(ValueError, match="Unknown parser 'yaml'. Choose one of hermes, json"):
        Endpoint(tool_parser="yaml")


def test_a_model_that_is_an_adapter_of_the_run_speaks_for_itself(endpoint: Endpoint) -> None:
    driver = ScriptedDriver(TOKENIZER)
    driver.adapters = ("policy", "base", "opponent")

    async def script(http: aiohttp.ClientSession, key: str, base_url: str) -> list[str]:
        async def ask(model: str, messages: list[Any]) -> Any:
            status, answer = await post(http, CHAT, {"model": model, "messages": messages, "temperature": 0.5})
            assert (status, answer["model"]) == (200, model), answer
            return answer["choices"][0]["message"]

        first = await ask("policy", MESSAGES)
        heard = await ask("opponent", [*MESSAGES, first, {"role": "user", "content": "b"}])
        await ask("opponent", MESSAGES)
        await ask("policy", [*MESSAGES, first, {"role": "user", "content": heard["content"]}])
        body = {"model": "base", "token_ids": [3, 4], "sampling_params": {}}
        assert (await post(http, "/inference/v1/generate", body))[1]["model"] == "base"
        status, error = await post(http, CHAT, {"model": "rival", "messages": MESSAGES})
        assert status == 404
        assert "This endpoint serves 'policy', 'base', 'opponent'." in error["error"]["message"]
        async with http.get("/v1/models/opponent") as answer:
            assert (await answer.json())["id"] == "opponent"
        async with http.get("/v1/models") as answer:
            return [model["id"] for model in (await answer.json())["data"]]

    assert play(endpoint, script, driver) == ["policy", "base", "opponent"]  # and the policy's turns alone are trained
    assert [(item.adapter, item.temperature) for item in driver.others] == [("opponent", 0.5)] * 2 + [("base", 1.0)]
    plain = ScriptedDriver(TOKENIZER)

    async def alone(http: aiohttp.ClientSession, key: str, base_url: str) -> None:
        answer = (await post(http, CHAT, {"messages": MESSAGES}))[1]
        assert answer["choices"][0]["message"]["content"]

    play(endpoint, alone, plain)
    assert driver.log[0] == plain.log[0]  # what else is asked for changes no draw of the policy


REFUSED: list[tuple[str, Any, int, str]] = [
    (CHAT, b"{", 400, "The body is not JSON"),
    (CHAT, b"\xff", 400, "The body is not JSON"),
    (CHAT, b"[" * 9000, 400, "The body is not JSON"),
    (CHAT, [], 400, "it must be a JSON object"),
    (CHAT, {}, 400, "'messages' must be a list"),
    (CHAT, {"messages": MESSAGES, "n": 0}, 400, "'n' must be a whole number from 1 to 128"),
    (CHAT, {"messages": MESSAGES, "max_tokens": 0.5}, 400, "'max_tokens' must be a whole number"),
    (CHAT, {"messages": MESSAGES, "temperature": -1}, 400, "'temperature' must be a number"),
    (CHAT, b'{"messages": [{"role": "user", "content": "a"}], "temperature": NaN}', 400, "'temperature'"),
    (CHAT, {"messages": MESSAGES, "stop": [3]}, 400, "'stop' must be"),
    (CHAT, {"messages": MESSAGES, "stop": 0}, 400, "it is 0."),
    (CHAT, {"messages": MESSAGES, "n": "2"}, 400, 'it is "2".'),
    (CHAT, {"messages": MESSAGES, "temperature": "0.5"}, 400, 'it is "0.5".'),
    (CHAT, {"messages": MESSAGES, "stream": "false"}, 400, "'stream' must be true or false; it is \"false\"."),
    (CHAT, {"messages": MESSAGES, "logprobs": 2}, 400, "'logprobs' must be true or false; it is 2."),
    (CHAT, {"messages": MESSAGES, "return_token_ids": "no"}, 400, "'return_token_ids' must be true or false"),
    (CHAT, {"messages": MESSAGES, "stream_options": True}, 400, "'stream_options' must be an object; it is true."),
    (CHAT, {"messages": MESSAGES, "stream_options": {"include_usage": "no"}}, 400, "'include_usage' must be"),
    (CHAT, {"messages": MESSAGES, "tools": ["x" * 900]}, 400, "x..."),
    (CHAT, {"messages": MESSAGES, "tools": False}, 400, "'tools' must be"),
    (CHAT, {"messages": MESSAGES, "tools": "x"}, 400, "'tools' must be"),
    (CHAT, {"messages": MESSAGES, "tool_choice": "required"}, 400, "no answer can be forced"),
    (CHAT, {"messages": MESSAGES, "response_format": {"type": "json_object"}}, 400, "no format can be forced"),
    (CHAT, {"messages": MESSAGES, "top_logprobs": 2, "logprobs": True}, 400, "'top_logprobs' must be 0"),
    (CHAT, {"messages": MESSAGES, "continue_final_message": True}, 400, "as token_ids to /inference/v1/generate"),
    (CHAT, {"messages": [{"role": "user", "content": "x" * 60_000}]}, 413, "larger than 50000 bytes"),
    ("/v1/chat", {}, 404, "There is no such route"),
    ("/health", {}, 405, "There is no such route"),
    ("/inference/v1/generate", {"token_ids": []}, 400, "at least one integer"),
    ("/inference/v1/generate", {"token_ids": [True]}, 400, "at least one integer"),
    ("/inference/v1/generate", {"token_ids": [1], "sampling_params": 3}, 400, "must be an object"),
    ("/inference/v1/generate", {"token_ids": [1], "features": {"x": 1}}, 400, "takes no images"),
    ("/inference/v1/generate", {"token_ids": [1], "stream": True}, 400, "'stream' must be false"),
    ("/inference/v1/generate", {"token_ids": [1], "stream": "false"}, 400, "'stream' must be true or false"),
    ("/inference/v1/generate", {"token_ids": [1], "sampling_params": ""}, 400, "must be an object"),
]


@pytest.mark.parametrize(
    ("path", "body", "ignored"),
    [
        (CHAT, {"messages": MESSAGES, "seed": 1}, ["seed"]),
        (CHAT, {"model": "opponent", "messages": MESSAGES, "temperature": 0.5, "top_p": 0.9}, ["top_p=0.9"]),
        (CHAT, {"model": "opponent", "messages": MESSAGES, "seed": 1, "top_p": 0.9}, ["seed", "top_p=0.9"]),
        ("/inference/v1/generate", {"token_ids": [3], "sampling_params": {"min_tokens": 5}}, ["min_tokens"]),
        ("/inference/v1/generate", {"token_ids": [3], "sampling_params": {"max_tokens": 5, "logprobs": 1}}, []),
    ],
)
def test_what_a_request_asks_for_in_vain_is_warned_of(path: str, body: Any, ignored: list[str], caplog: Any) -> None:
    made, driver = Endpoint(), ScriptedDriver(TOKENIZER)
    driver.adapters = ("policy", "opponent")

    async def script(http: aiohttp.ClientSession, key: str, base_url: str) -> int:
        await post(http, path, body)
        return (await post(http, path, body))[0]  # each field is named once

    made.start()
    assert play(made, script, driver) == 200
    made.stop()
    warned = [item.getMessage() for item in caplog.records if "that the endpoint ignores" in item.getMessage()]
    assert [text.split("ignores: ")[1].split(". ")[0] for text in warned] == ignored


def test_bad_requests_are_refused_in_the_form_of_openai(endpoint: Endpoint) -> None:
    async def script(http: aiohttp.ClientSession, key: str, base_url: str) -> None:
        for path, body, status, message in REFUSED:
            found, answer = await post(http, path, body)
            assert (found, set(answer["error"])) == (status, {"message", "type", "param", "code"}), (path, body, answer)
            assert message in answer["error"]["message"]

    play(endpoint, script)


class SlowDriver(ScriptedDriver):
    """Never answers, and counts what it was asked and what was given up."""

    def __init__(self) -> None:
        super().__init__(TOKENIZER)
        self.num_asked = self.num_given_up = 0

    async def generate(self, prompt: Any, params: Any) -> Any:
        self.num_asked += 1
        try:
            await asyncio.sleep(3600)
        finally:
            self.num_given_up += 1


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.01)


def test_a_client_that_hangs_up_gives_its_request_up(endpoint: Endpoint) -> None:
    driver = SlowDriver()

    async def script(http: aiohttp.ClientSession, key: str, base_url: str) -> None:
        asking = asyncio.ensure_future(post(http, CHAT, {"messages": MESSAGES, "n": 3}))
        await until(lambda: driver.num_asked == 3)
        asking.cancel()
        await until(lambda: driver.num_given_up == 3)

    play(endpoint, script, driver)
    gc.collect()
    assert (driver.num_asked, driver.num_given_up) == (3, 3)


def test_the_end_of_an_episode_ends_its_requests(endpoint: Endpoint) -> None:
    driver = SlowDriver()

    async def run() -> tuple[int, Any]:
        key, _ = endpoint.open(client_of(driver, TOKENIZER), task_of(TOKENIZER), asyncio.get_running_loop())
        async with aiohttp.ClientSession(endpoint.origin, headers={"x-api-key": key}) as http:
            asking = asyncio.ensure_future(post(http, CHAT, {"messages": MESSAGES}))
            await until(lambda: driver.num_asked == 1)
            assert endpoint.loop is not None
            endpoint.loop.call_soon_threadsafe(endpoint.close, key)
            answer = await asking
            await until(lambda: driver.num_given_up == 1)
            return answer

    status, answer = asyncio.run(run())
    assert (status, answer["error"]["code"]) == (401, "episode_ended")


def test_a_visitor_whose_engine_falls_asleep_is_told_to_try_again(endpoint: Endpoint) -> None:
    driver = SlowDriver()

    def ask() -> tuple[int, Any]:
        async def run() -> tuple[int, Any]:
            async with aiohttp.ClientSession(endpoint.origin) as http:
                return await post(http, CHAT, {"messages": MESSAGES})

        return asyncio.run(run())

    async def run() -> None:
        key, _ = endpoint.open(client_of(driver, TOKENIZER), task_of(TOKENIZER), asyncio.get_running_loop())
        asked.append(pool.submit(ask))
        await until(lambda: driver.num_asked == 1)
        endpoint.close(key)

    asked: list[Any] = []
    with ThreadPoolExecutor(1) as pool:
        asyncio.run(run())
        status, answer = asked[0].result(60)
    assert (status, answer["error"]["code"]) == (503, "engine_asleep")


def test_a_request_that_waits_until_its_episode_has_ended_generates_nothing() -> None:
    driver, loop = ScriptedDriver(TOKENIZER), asyncio.new_event_loop()  # an engine that sleeps

    async def run() -> None:
        session = Session(client_of(driver, TOKENIZER), loop, task_of(TOKENIZER), wait_s=10)
        asking = asyncio.ensure_future(session.chat(MESSAGES, [], Wish()))
        await asyncio.sleep(0)
        session.close()
        waking.start()
        with pytest.raises(RequestError, match="has ended"):
            await asking

    waking = threading.Thread(target=loop.run_forever, daemon=True)
    asyncio.run(run())
    loop.call_soon_threadsafe(loop.stop)
    waking.join(60)
    loop.close()
    assert driver.log == []


def test_a_visitor_waits_for_an_episode_and_needs_the_key(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    monkeypatch.setenv("POLICY_KEY", "sesame")
    made = Endpoint(wait_s=0.1, api_key_env="POLICY_KEY", model="mine")
    caplog.set_level(logging.DEBUG)

    async def ask(http: aiohttp.ClientSession, **headers: str) -> tuple[int, Any, str | None]:
        async with http.post(CHAT, json={"messages": MESSAGES}, headers=headers) as answer:
            return answer.status, await answer.json(), answer.headers.get("Retry-After")

    async def run() -> None:
        made.start()
        async with aiohttp.ClientSession(made.origin) as http:
            status, answer, _ = await ask(http, Authorization="Bearer wrong")
            assert (status, answer["error"]["code"]) == (401, "invalid_api_key")
            status, answer, retry = await ask(http, Authorization="Bearer sesame")
            assert (status, answer["error"]["code"], retry) == (503, "engine_asleep", "5")
            async with http.get("/health") as health:
                assert await health.json() == {"status": "ok", "engine": "asleep"}
            key, session = made.open(
                client_of(ScriptedDriver(TOKENIZER), TOKENIZER), task_of(TOKENIZER), asyncio.get_running_loop()
            )
            status, answer, _ = await ask(http, Authorization="Bearer sesame")
            assert (status, answer["model"]) == (200, "mine")
            assert session.episodes() == []
            made.close(key)
        made.stop()

    asyncio.run(run())
    assert "sesame" not in caplog.text
    assert "lightrl-episode-" not in caplog.text


def test_bad_settings_are_refused_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"host=0.0.0.0 can be reached from other machines: set api_key_env"):
        Endpoint(host="0.0.0.0")
    with pytest.raises(ValueError, match="the environment variable NO_SUCH is not set"):
        Endpoint(api_key_env="NO_SUCH")
    for settings in ({"port": 70000}, {"wait_s": float("nan")}, {"max_body_mb": float("inf")}):
        with pytest.raises(ValueError, match="a port is from 0 to 65535, .* above 0 and finite"):
            Endpoint(**settings)
    Endpoint(wait_s=float("inf"), max_body_mb=0.5)
    monkeypatch.setattr("lightrl.rollout.endpoint.server.is_installed", lambda name: False)
    with pytest.raises(ImportError, match=r"pip install 'lightrl\[serve\]'"):
        require_aiohttp()


@pytest.mark.skipif(not MOST_WAITING.exists() or int(MOST_WAITING.read_text()) < 1000, reason="the system allows few")
def test_many_agents_connect_while_the_endpoint_is_busy(endpoint: Endpoint) -> None:
    assert endpoint.loop is not None
    endpoint.loop.call_soon_threadsafe(time.sleep, 6)
    host, port = endpoint.origin.removeprefix("http://").split(":")
    began = time.monotonic()
    with ExitStack() as opened:
        for _ in range(300):
            opened.enter_context(socket.create_connection((host, int(port)), timeout=30))
        assert time.monotonic() - began < 5


def test_a_port_that_is_taken_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        made = Endpoint(port=taken.getsockname()[1])
        for _ in range(2):  # as several episodes do
            with pytest.raises(OSError, match=r"The endpoint cannot listen on 127.0.0.1:\d+"):
                made.start()


def test_a_port_that_the_number_of_the_rank_raises_too_far_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    with pytest.raises(OSError, match="The endpoint cannot listen on 127.0.0.1:65536"):
        Endpoint(port=65535).start()


def test_a_key_that_is_not_utf8_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLICY_KEY", "sesame")
    made = Endpoint(api_key_env="POLICY_KEY")
    made.start()
    with socket.create_connection(("127.0.0.1", int(made.origin.rpartition(":")[2])), timeout=10) as raw:
        raw.sendall(b"GET /v1/models HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer \xff\r\n\r\n")
        assert raw.recv(100).startswith(b"HTTP/1.1 401 ")
    made.stop()
