"""Images that agents send: the engine draws from them, and the trainer scores what it drew from."""

from __future__ import annotations

import asyncio
import base64
import threading
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from endpoint_scripts import TOKENIZER, ScriptedDriver, client_of, task_of
from screens import screen
from tiny_vlm import FAMILIES, IMAGE, checkered, save_tiny_vlm, tiny_media, tiny_model
from torch.testing import assert_close

from lightrl.config import GRPOConfig, WorkflowConfig
from lightrl.data.media import PromptEncoder, read_image
from lightrl.data.packing import pack, unpack
from lightrl.engines.base import SamplingParams
from lightrl.models.policy import Policy, load_policy, load_tokenizer
from lightrl.records import Experience, Prompt, Sample
from lightrl.rewards.reward_set import RewardSet
from lightrl.rollout import observations
from lightrl.rollout.client import EngineClient, EpisodeLimits
from lightrl.rollout.endpoint.errors import RequestError
from lightrl.rollout.endpoint.images import identity, image_part, in_words, with_images
from lightrl.rollout.endpoint.messages import checked_messages
from lightrl.rollout.endpoint.requests import chat_answer, chat_wish, token_wish
from lightrl.rollout.endpoint.session import Session
from lightrl.rollout.episode_collector import EpisodeCollector
from lightrl.rollout.observations import images_of
from lightrl.rollout.workflow import load_workflow
from lightrl.strategy import create_strategy

TEMPERATURE = 0.8
LIMITS = EpisodeLimits(max_new_tokens=4, max_turns=3, max_tokens=200)


def url_of(image: Any, kind: str = "PNG") -> str:
    file = BytesIO()
    image.save(file, kind)
    return f"data:image/{kind.lower()};base64,{base64.b64encode(file.getvalue()).decode()}"


def linked(url: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def as_user(*parts: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


def as_text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


# ---- With an engine ----------------------------------------------------------------------------------------------


def task(folder: Path, text: str, *images: Any) -> Prompt:
    """Returns a prompt of the tiny models: a text with an image for each <image>, as a data set holds it."""
    paths = tuple(str(folder / f"{number}.png") for number in range(len(images)))
    for path, image in zip(paths, images, strict=True):
        image.save(path)
    rendered = f"user:{text.replace('<image>', IMAGE)};assistant:"
    parts = [{"type": "image"}] * len(images) + [as_text(text.replace("<image>", ""))]
    ids = tuple(tiny_media("qwen2_5_vl").processor.tokenizer.encode(rendered))
    message = {"role": "user", "content": parts if images else text}
    return Prompt(index=len(images), text=rendered, token_ids=ids, messages=(message,), images=paths)


def own_logprobs(model: Any, media: Any, sample: Sample, shown: list[Any]) -> Any:
    """By transformers' own forward of the whole sequence, with its own positions."""
    ids = torch.tensor([[*sample.prompt_ids, *sample.response_ids]])
    inputs = {}
    if shown:
        processed = media.processor.image_processor(shown, return_tensors="pt")
        inputs = {"pixel_values": processed["pixel_values"], "image_grid_thw": processed["image_grid_thw"]}
        inputs["mm_token_type_ids"] = (ids == media.image_token_id).int()
    logits = model(input_ids=ids, use_cache=False, **inputs).logits[0, len(sample.prompt_ids) - 1 : -1]
    scores = (logits.float() / TEMPERATURE).log_softmax(-1)
    return scores.gather(1, torch.tensor(sample.response_ids)[:, None])[:, 0]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_trainer_scores_what_the_engine_drew_from(family: str, tmp_path: Path) -> None:
    """Of prompts with and without images: conversations that go on, fork, and begin with another image."""
    save_tiny_vlm(tmp_path / "model", family)
    strategy = create_strategy(GRPOConfig(strategy="single"))
    strategy.setup_distributed()
    actor = strategy.prepare(load_policy(str(tmp_path / "model"), materialize=True))
    strategy.tokenizer, strategy.media = load_tokenizer(str(tmp_path / "model")), tiny_media(family)
    strategy.setup_inference_engine(None, "native", actor=actor)
    prompts = [(0, task(tmp_path, "play")), (1, task(tmp_path, "<image>which?", checkered(84, 56)))]
    workflow: Any = load_workflow(
        WorkflowConfig(workflow="agent", workflow_args=("agent=tests.programs.seeing_agents:show",))
    )
    collector = EpisodeCollector(strategy, RewardSet.of(lambda sample: 1.0), workflow, seed=3, limits=LIMITS)
    try:
        drawn = collector.sample(prompts, step=0, group_size=2, temperature=TEMPERATURE)
    finally:
        workflow.endpoint.stop()
    media, encode = strategy.media, PromptEncoder(strategy.media)
    model, policy = tiny_model(family), Policy(tiny_model(family))
    for main in drawn:
        assert main.numbers == {"calls": 5.0, "branches": 2.0, "seen": 5.0}
        samples = [main, *main.branches]
        assert [len(sample.turns) for sample in samples] == [3, 1, 1]
        assert [len(sample.images) for sample in samples] == [3, 3, 1]
        assert main.images[0] == main.images[1] == main.branches[0].images[0] != main.branches[1].images[0]
        experiences = [Experience(sample=sample, reward=1.0, advantage=1.0) for sample in samples]
        with torch.no_grad():
            batch = pack(experiences, temperature=TEMPERATURE, old_logprobs=None, ref_logprobs=None, encode=encode)
            found = unpack(batch, policy(batch).logprobs)
            for sample in samples:
                own = torch.tensor(sample.is_own, dtype=torch.bool)
                assert_close(found[sample.key][own], torch.tensor(sample.sampler_logprobs)[own], atol=1e-5, rtol=0)
                before = [] if sample is samples[2] else [read_image(path) for path in main.prompt.images]
                shown = before + [read_image(image) for image in sample.images]
                assert_close(own_logprobs(model, media, sample, shown), found[sample.key], atol=1e-5, rtol=0)


# ---- Without an engine -------------------------------------------------------------------------------------------


class Expanding(ScriptedDriver):
    """Answers like an engine that sees images."""

    async def generate(self, prompt: Any, params: Any) -> Any:
        sizes = [(image.height, image.width) for image in prompt.images]
        ids = tiny_media("qwen2_5_vl").expanded(prompt.token_ids, sizes, ())
        return replace(await super().generate(prompt, params), prompt_token_ids=ids)


@pytest.fixture
def vision() -> tuple[Any, ScriptedDriver]:
    tokenizer = tiny_media("qwen2_5_vl").processor.tokenizer
    tokenizer.chat_template = tiny_media("qwen2_5_vl").processor.chat_template
    return tokenizer, Expanding(tokenizer, num_words=20)


def session_of(vision: tuple[Any, ScriptedDriver], data: Prompt, **limits: int) -> Session:
    tokenizer, driver = vision
    own = EpisodeLimits(**{"max_new_tokens": 64, "max_turns": 64, "max_tokens": 400, **limits})
    settings: dict[str, Any] = {"seed": 5, "sample_index": 0, "sampling": SamplingParams(), "limits": own}
    client = EngineClient(driver, tokenizer, **settings, prompt=data, media=tiny_media("qwen2_5_vl"))  # type: ignore[arg-type]
    return Session(client, asyncio.get_running_loop(), data, wait_s=0)


async def ask(session: Session, *messages: Any, **others: Any) -> Any:
    body = {"messages": list(messages), "return_token_ids": True, **others}
    return chat_answer(await session.chat(*chat_wish(body)), body, "policy", session.engine.tokenizer)


def test_the_same_image_again_is_no_new_token_and_another_one_another_prompt(
    vision: tuple[Any, ScriptedDriver], tmp_path: Path
) -> None:
    async def run() -> None:
        session = session_of(vision, task(tmp_path, "play"))
        seen, other = (as_user(as_text("see"), linked(url_of(screen(text)))) for text in "ab")
        first = await ask(session, seen)
        message = first["choices"][0]["message"]
        again = {"role": "user", "content": [as_text("s"), as_text("ee"), *seen["content"][1:]]}
        await ask(session, again, {"role": "assistant", "content": message["content"]}, other)
        await ask(session, other, message, seen)
        one, two, three = session.conversations.calls
        assert two.parent is one
        assert three.parent is None
        assert [len(images_of(call.prompt_ids)) for call in (one, two, three)] == [1, 2, 2]
        assert two.prompt_ids[: len(one.ids)] == one.ids
        counts = [image.num_tokens for image in images_of(two.prompt_ids)]
        assert counts == [1, 6]  # 30 x 30 and 90 x 60 pixels in squares of 28 x 28
        assert session.engine.num_tokens(two.prompt_ids) == len(two.prompt_ids) + 5
        assert len({identity(call.prompt_ids) for call in (one, two, three)}) == 3
        first, second = session.episodes()
        assert [image.content for image in first.images] == [image.content for image in reversed(second.images)]

    asyncio.run(run())


def test_draws_depend_on_the_images_and_not_on_the_order_of_arrival(
    vision: tuple[Any, ScriptedDriver], tmp_path: Path
) -> None:
    bodies = [as_user(linked(url_of(checkered(28, 28, seed=seed)))) for seed in (1, 2)]

    async def run(*order: int) -> dict[int, list[int]]:
        session = session_of(vision, task(tmp_path, "play"))
        return {index: (await ask(session, bodies[index]))["choices"][0]["token_ids"] for index in order}

    found = asyncio.run(run(0, 1))
    assert found == asyncio.run(run(1, 0))
    assert found[0] != found[1]


def test_parts_without_an_image_are_those_of_the_prompt(vision: tuple[Any, ScriptedDriver], tmp_path: Path) -> None:
    async def run() -> None:
        image = checkered(84, 56)
        data = task(tmp_path, "<image>which?", image)
        session = session_of(vision, data)
        session.engine._siblings.media = lambda prompt: ((image,), ())  # type: ignore[method-assign,assignment]
        sent = as_user(linked("data:image/png;base64," + base64.b64encode(Path(data.images[0]).read_bytes()).decode()))
        sent["content"].append(as_text("which?"))
        await ask(session, *data.messages)
        await ask(session, sent)
        system = {"role": "system", "content": "Look."}
        await ask(session, system, *data.messages)
        other = as_user(linked(url_of(image, "WEBP")), as_text("which?"))
        await ask(session, other)
        own, same, longer, others = session.conversations.calls
        assert own.prompt_ids == same.prompt_ids == others.prompt_ids == data.token_ids
        assert [len(images_of(call.prompt_ids)) for call in (own, same, longer, others)] == [0, 0, 1, 1]
        for count, messages in ((2, [*data.messages] * 2), (2, [*data.messages, as_user({"type": "image"})])):
            with pytest.raises(RequestError, match=rf"have {count} image part\(s\) without .* episode has 1 image"):
                await ask(session, *messages)
        with pytest.raises(RequestError, match="has a token that stands for an image or a video, without the image"):
            await ask(session, {"role": "user", "content": f"a{IMAGE}"})
        with pytest.raises(RequestError, match="has a token that stands for an image or a video, without the image"):
            await session.complete(*token_wish({"token_ids": list(longer.ids)}))

    asyncio.run(run())


def test_an_image_counts_with_all_its_tokens(vision: tuple[Any, ScriptedDriver], tmp_path: Path) -> None:
    async def run() -> None:
        shown = as_user(linked(url_of(checkered(84, 56))))
        length = len("user:;assistant:") + 2 + 6  # the marks around an image, and 3 x 2 tokens
        with pytest.raises(RequestError, match=f"length is {length} tokens") as told:
            await ask(session_of(vision, task(tmp_path, "play"), max_tokens=length), shown)
        assert f"in {length} tokens" in str(told.value)
        await ask(session_of(vision, task(tmp_path, "play"), max_tokens=length + 1), shown)

    asyncio.run(run())


@pytest.mark.timeout(120)
def test_others_are_served_while_an_image_is_read(
    vision: tuple[Any, ScriptedDriver], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    has_begun, may_go_on = threading.Event(), threading.Event()

    def read_slowly(content: bytes) -> Any:
        has_begun.set()
        assert may_go_on.wait(20), "the loop serves nobody meanwhile"
        return read_image(content)

    monkeypatch.setattr(observations, "read_image", read_slowly)

    async def run() -> None:
        session = session_of(vision, task(tmp_path, "play"))
        shown = asyncio.ensure_future(ask(session, as_user(linked(url_of(checkered(84, 56))))))
        while not has_begun.is_set():
            await asyncio.sleep(0.01)
        told = await ask(session, {"role": "user", "content": "a"})
        may_go_on.set()
        seen = await shown
        first, second = session.conversations.calls
        assert [tuple(answer["prompt_token_ids"]) for answer in (told, seen)] == [first.prompt_ids, second.prompt_ids]
        (image,) = images_of(second.prompt_ids)
        assert (type(image.content), image.picture.size) == (bytes, (84, 56))

    asyncio.run(run())


def test_broken_images_are_refused(vision: tuple[Any, ScriptedDriver], tmp_path: Path) -> None:
    cut = url_of(checkered(84, 56))[:-400]

    async def run() -> None:
        session = session_of(vision, task(tmp_path, "play"))
        with pytest.raises(RequestError, match=r"An image cannot be read: the image of \d+ bytes cannot be read"):
            await ask(session, as_user(linked(cut)))
        vision[0].chat_template = session.engine.media.processor.chat_template = "no place"  # type: ignore[union-attr]
        with pytest.raises(RequestError, match=r"refuses the messages: .* gives 0 places to the 1 image"):
            await ask(session, as_user(linked(url_of(checkered(28, 28)))))

    asyncio.run(run())


@pytest.mark.parametrize(
    ("part", "told"),
    [
        (linked("https://example.com/a.png"), "has the address 'https://example.com/a.png'. The endpoint fetches no"),
        (linked("file:///etc/passwd"), "reads no files: send the image itself as a data URL"),
        ({"type": "image", "image": "/etc/passwd"}, "has the address '/etc/passwd'"),
        ({"type": "image", "path": "/etc/passwd"}, 'must be {"type": "image_url"'),
        ({"type": "image", "image": {"path": "/etc/passwd"}}, 'must be {"type": "image_url"'),
        (linked("data:text/html;base64,AAAA"), "has the address 'data:text/html"),
        (linked("data:image/png;base64,?"), "holds an image that is no base64"),
        (linked("data:image/png;base64," + base64.b64encode(b"%!PS-Adobe").decode()), "is no PNG, JPEG, GIF or WebP"),
        ({"type": "image_url"}, 'must be {"type": "image_url"'),
    ],
)
def test_nothing_is_fetched_and_no_file_is_read(part: dict[str, Any], told: str) -> None:
    with pytest.raises(RequestError) as error:
        image_part(part, "messages[0].content[1]")
    assert told in str(error.value)
    assert error.value.param == "messages[0].content[1]"


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF", "WEBP"])
def test_the_usual_formats_are_taken(kind: str) -> None:
    part = image_part(linked(url_of(checkered(28, 28), kind)), "here")
    assert part["type"] == "image"
    assert read_image(part["image"]).size == (28, 28)
    assert image_part({"type": "image", "image": url_of(checkered(28, 28), kind)}, "here") == part
    assert image_part({"type": "image", "text": None}, "here") == {"type": "image"}


def test_a_model_of_text_refuses_images() -> None:
    messages = checked_messages([as_user(linked(url_of(checkered(28, 28))), as_text("?"))])
    client = client_of(ScriptedDriver(TOKENIZER), TOKENIZER)
    with pytest.raises(RequestError, match="have an image, and this model takes only text") as error:
        with_images(messages, client, task_of(TOKENIZER))
    assert error.value.status == 400


def test_messages_are_compared_by_the_content_of_their_images() -> None:
    seeing: Any = SimpleNamespace(placeholder_ids=frozenset((9,)))
    one, two = ([as_user({"type": "image", "image": content}, as_text("a"))] for content in (b"1", b"2"))
    assert with_images(one, seeing, None) == one
    assert in_words(one[0]) == in_words(dict(one[0]))
    assert in_words(one[0]) != in_words(two[0])
    assert in_words(one[0]) != in_words(as_user(as_text("a"), {"type": "image", "image": b"1"}))
    text = {"role": "user", "content": "a"}
    assert in_words(text) is text
