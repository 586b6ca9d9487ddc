"""Images that arrive in an episode: what the engine drew from is what the trainer scores, at the same positions."""

from __future__ import annotations

import asyncio
import base64
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from screens import Looking, Screens, screen
from tiny_vlm import FAMILIES, IMAGE, VIDEO, checkered, frames, save_tiny_vlm, tiny_media, tiny_model
from torch.testing import assert_close

from lightrl import Episode, Workflow
from lightrl.config import GRPOConfig
from lightrl.data.held_images import image_content
from lightrl.data.media import MediaError, PromptEncoder, read_image
from lightrl.data.packing import pack, unpack
from lightrl.models.policy import Policy, load_policy, load_tokenizer
from lightrl.records import Experience, Prompt, Sample
from lightrl.rewards.reward_set import RewardSet
from lightrl.rollout.client import EngineClient, EpisodeLimits
from lightrl.rollout.episode import Turn
from lightrl.rollout.episode_collector import EpisodeCollector, _as_episode
from lightrl.rollout.multi_turn import MultiTurnWorkflow
from lightrl.rollout.observations import SeenIds, SeenImage, as_messages, num_tokens, shown_in, token_counts
from lightrl.rollout.workflow import EnvironmentWorkflow
from lightrl.sharing.model import attach_sharing
from lightrl.sharing.tree import SharedBatch, share
from lightrl.strategy import StrategyBase, create_strategy

LIMITS = EpisodeLimits(max_new_tokens=4, max_turns=3, max_tokens=200)
TEMPERATURE = 0.8


@pytest.fixture(scope="module", params=FAMILIES)
def strategy(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> StrategyBase:
    folder: Path = tmp_path_factory.mktemp(request.param)
    save_tiny_vlm(folder, request.param)
    made = create_strategy(GRPOConfig(strategy="single"))
    made.setup_distributed()
    policy = made.prepare(load_policy(str(folder), materialize=True))
    made.tokenizer, made.media = load_tokenizer(str(folder)), tiny_media(request.param)
    made.setup_inference_engine(None, "native", actor=policy)
    return made


@pytest.fixture
def prompts(strategy: StrategyBase, tmp_path: Path) -> list[tuple[int, Prompt]]:
    """Of text, of an image, and of a video."""
    checkered(84, 56).save(tmp_path / "a.png")
    np.save(tmp_path / "v.npy", frames(3, 50, 40))
    shown: list[dict[str, Any]] = [{}, {"images": (str(tmp_path / "a.png"),)}, {"videos": (str(tmp_path / "v.npy"),)}]
    made = []
    for index, (text, media) in enumerate(zip(("play", f"a{IMAGE}?", f"{VIDEO}b"), shown, strict=True)):
        rendered = f"user:{text};assistant:"
        ids = tuple(strategy.tokenizer.encode(rendered))  # type: ignore[union-attr]
        message = {"role": "user", "content": text}
        made.append((index, Prompt(index=index, text=rendered, token_ids=ids, messages=(message,), **media)))
    return made


def draw(
    strategy: StrategyBase, prompts: list[tuple[int, Prompt]], workflow: Workflow, limits: EpisodeLimits = LIMITS
) -> list[Sample]:
    collector = EpisodeCollector(strategy, RewardSet.of(lambda sample: 1.0), workflow, seed=3, limits=limits)
    return collector.sample(prompts, step=0, group_size=2, temperature=TEMPERATURE)


def screens() -> Workflow:
    return EnvironmentWorkflow(environment="screens:Screens")


def own_logprobs(model: Any, sample: Sample, family: str) -> Any:
    """By transformers' own forward of the whole sequence, with its own positions."""
    media, ids = tiny_media(family), torch.tensor([[*sample.prompt_ids, *sample.response_ids]])
    images = [read_image(image) for image in (*sample.prompt.images, *sample.images)]
    inputs = media.processor.image_processor(images, return_tensors="pt")
    logits = model(
        input_ids=ids,
        use_cache=False,
        mm_token_type_ids=(ids == media.image_token_id).int(),
        pixel_values=inputs["pixel_values"],
        image_grid_thw=inputs["image_grid_thw"],
    ).logits[0, len(sample.prompt_ids) - 1 : -1]
    scores = (logits.float() / TEMPERATURE).log_softmax(-1)
    return scores.gather(1, torch.tensor(sample.response_ids)[:, None])[:, 0]


def packed(samples: list[Sample], encode: PromptEncoder) -> Any:
    experiences = [Experience(sample=item, reward=1.0, advantage=1.0) for item in samples]
    return pack(experiences, temperature=TEMPERATURE, old_logprobs=None, ref_logprobs=None, encode=encode)


@pytest.mark.parametrize("make", [screens, Looking], ids=["environment", "tools"])
def test_the_trainer_scores_what_the_engine_drew_from(
    make: Any, strategy: StrategyBase, prompts: list[tuple[int, Prompt]]
) -> None:
    media = strategy.media
    assert media is not None
    family = media.config.model_type
    samples = draw(strategy, prompts, make())
    model = tiny_model(family)
    policy, encode = Policy(tiny_model(family)), PromptEncoder(media)
    sharing = Policy(tiny_model(family))
    attach_sharing(sharing, strategy)
    with torch.no_grad():
        batch = packed(samples, encode)
        together = unpack(batch, policy(batch).logprobs)
        shared = share(batch)
        assert isinstance(shared, SharedBatch)
        assert_close(sharing(shared).logprobs, policy(batch).logprobs, atol=1e-5, rtol=0)
        masks = unpack(batch, batch.loss_mask)
        for sample in samples:
            assert len(sample.images) == (2 if make is Looking else 3 + (sample.prompt.index == 0))
            assert len(sample.turns) == 3
            sequence = (*sample.prompt_ids, *sample.response_ids)
            own = torch.tensor(sample.is_own)
            assert masks[sample.key].tolist() == own.tolist()
            is_image = torch.tensor(sample.response_ids) == media.image_token_id
            assert is_image.any()
            assert not own[is_image].any()
            assert_close(together[sample.key][own], torch.tensor(sample.sampler_logprobs)[own], atol=1e-5, rtol=0)
            alone = packed([sample], encode)
            assert alone.input_ids.tolist() == list(sequence)
            assert_close(policy(alone).logprobs, together[sample.key], atol=1e-5, rtol=0)
            if not sample.prompt.videos:  # transformers has positions of its own for videos
                assert_close(own_logprobs(model, sample, family), together[sample.key], atol=1e-5, rtol=0)
    assert len({sample.images for sample in samples}) == (1 if make is Looking else len(samples))


class Beginning:
    """Shows an image at the beginning, of which each environment makes its own."""

    def reset(self, data: Prompt) -> Any:
        return screen(data.text)

    def step(self, action: str) -> tuple[str, float, bool]:
        return "", 1.0, True


def test_a_first_image_that_siblings_share_is_computed_once(
    strategy: StrategyBase, prompts: list[tuple[int, Prompt]], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = strategy.serving.require_engine()
    submitted: list[int] = []
    submit = engine.submit
    monkeypatch.setattr(engine, "submit", lambda *args: (submitted.append(args[1].n), submit(*args))[1])
    shown = [(index, replace(prompts[0][1], index=index, text=f"{index}")) for index in range(2)]
    samples = draw(strategy, shown, EnvironmentWorkflow(environment=f"{__name__}:Beginning"))
    assert submitted == [2, 2]
    assert [len(sample.images) for sample in samples] == [1] * 4


class Text:
    """Begins with a text, which makes the prompt of the episode another one than that of the data set."""

    def reset(self, data: Prompt) -> str:
        return "Go!"

    def step(self, action: str) -> tuple[str, float, bool]:
        return "", 1.0, True


def test_a_prompt_that_a_first_text_changes_is_trained(
    strategy: StrategyBase, prompts: list[tuple[int, Prompt]]
) -> None:
    assert strategy.media is not None
    samples = draw(strategy, prompts[:1], EnvironmentWorkflow(environment=f"{__name__}:Text"))
    batch = packed(samples, PromptEncoder(strategy.media))
    with torch.no_grad():
        found = unpack(batch, Policy(tiny_model(strategy.media.config.model_type))(batch).logprobs)
    for sample in samples:
        assert strategy.tokenizer.decode(sample.prompt_ids) == "user:playGo!;assistant:"  # type: ignore[union-attr]
        assert_close(found[sample.key], torch.tensor(sample.sampler_logprobs), atol=1e-5, rtol=0)


def test_an_image_that_has_no_room_ends_the_episode_before_it(
    strategy: StrategyBase, prompts: list[tuple[int, Prompt]]
) -> None:
    """If it counted as its one placeholder, the last turn would have room."""
    workflow = MultiTurnWorkflow(user=f"{__name__}:show")
    long = draw(strategy, prompts[:1], workflow)
    assert [(sample.finish_reason == "context", len(sample.images)) for sample in long] == [(False, 2)] * 2
    before_last_turn = min(len(sample.prompt_ids) + sample.turns[2] for sample in long)
    short = draw(strategy, prompts[:1], workflow, replace(LIMITS, max_tokens=before_last_turn))
    assert [(sample.finish_reason, len(sample.images)) for sample in short] == [("context", 1)] * 2
    for whole, cut in zip(long, short, strict=True):
        assert whole.response_ids[: len(cut.response_ids)] == cut.response_ids
        assert cut.is_own[-1]


class Listing(Workflow):
    """Asks for room behind a list of tokens, as one may with text."""

    def __init__(self, content: Any) -> None:
        self._message = {"role": "user", "content": content}

    async def arun_episode(self, engine: EngineClient, data: Prompt) -> Episode:
        episode = Episode(data.token_ids)
        turn = await engine.generate(episode.ids)
        episode.say(turn)
        heard = engine.encode_messages([self._message], after=turn)
        if engine.room([*episode.ids, *heard]) > 0:
            episode.hear(heard)
        episode.reward = 1.0
        return episode


def test_room_takes_no_list_that_has_lost_images(strategy: StrategyBase, prompts: list[tuple[int, Prompt]]) -> None:
    """They would count as one token each, and the episode could become longer than --rollout.max_context_tokens."""
    assert all(sample.num_own for sample in draw(strategy, prompts, Listing("again")))
    for one in prompts:
        with pytest.raises(RuntimeError, match=r"1 places of images and 0 images\. A list of tokens has no images"):
            draw(strategy, [one], Listing([{"type": "image", "image": checkered(84, 56)}]))


def show(answer: str, data: Prompt) -> Any:
    return checkered(84, 56)  # 3 x 2 tokens of Qwen2.5-VL and of Qwen3-VL


# ---- Without an engine -------------------------------------------------------------------------------------------


def image_of(seed: int, count: int) -> SeenImage:
    return SeenImage(bytes([seed]), "pixels", 9, count)


def said(*ids: int, **changes: Any) -> Any:
    values = {"logprobs": (-0.5,) * len(ids), "versions": (1,) * len(ids), "finish_reason": "stop", "text": ""}
    return Turn(token_ids=ids, **{**values, **changes})


def test_a_sample_has_the_tokens_that_images_become() -> None:
    assert token_counts((2, 9, 3, 9), [image_of(0, 3), image_of(1, 2)]) == [1, 3, 1, 2]
    episode = Episode(SeenIds((2, 9), [image_of(0, 3)]))
    assert num_tokens(episode.ids) == 4
    episode.say(said(5, prompt_ids=(2, 9), expanded_ids=(2, 9, 9, 9)))
    episode.hear(SeenIds((7, 9, 8), [image_of(1, 2)]))
    assert episode.ids == (2, 9, 5, 7, 9, 8)
    assert num_tokens(episode.ids) == 9  # 4, then 5 7 9 9 8
    assert [image.content for image in episode.ids.images] == [b"\0", b"\1"]
    episode.say(said(6, prompt_ids=(2, 9, 5, 7, 9, 8), expanded_ids=(2, 9, 9, 9, 5, 7, 9, 9, 8)))
    sample = episode.sample(Prompt(index=0, text="", token_ids=(2,)), 0, 0, SimpleNamespace(decode=lambda *_, **__: ""))
    assert (sample.prompt_ids, sample.response_ids) == ((2, 9, 9, 9), (5, 7, 9, 9, 8, 6))
    assert sample.own == (True, False, False, False, False, True)
    assert sample.sampler_logprobs == (-0.5, 0.0, 0.0, 0.0, 0.0, -0.5)
    assert sample.versions == (1,) * 6
    assert sample.turns == (0, 5)
    assert sample.images == (b"\0", b"\1")


def test_an_engine_that_expands_an_image_otherwise_is_refused() -> None:
    episode = Episode([2])
    episode.say(said(5))
    episode.hear(SeenIds((9,), [image_of(0, 3)]))
    with pytest.raises(ValueError, match="expand an image of the episode in different ways"):
        episode.say(said(6, prompt_ids=(2, 5, 9), expanded_ids=(2, 5, 9, 9)))


def test_an_episode_that_has_lost_an_image_is_refused() -> None:
    client: Any = SimpleNamespace(has_rewarded=False, placeholder_ids=frozenset((9, 10)))
    prompt = Prompt(index=0, text="", token_ids=(2,))
    kept, lost = Episode([2]), Episode([2])
    kept.hear(SeenIds((7, 9), [image_of(0, 3)]))
    lost.hear([*SeenIds((7, 9), [image_of(0, 3)])])
    assert _as_episode(kept, client, prompt) is kept
    assert [(image.content, image.picture) for image in kept.images] == [(b"\0", None)]
    with pytest.raises(ValueError, match=r"has 1 places of images and 0 images"):
        _as_episode(lost, client, prompt)


def read(*messages: dict[str, Any], template: str | None = None) -> Any:
    media = tiny_media("qwen2_5_vl") if template is None else tiny_media("qwen2_5_vl", template)
    shown = shown_in(messages, media.processor.tokenizer, media)
    rendered = shown.renderer.apply_chat_template(list(shown.messages), tokenize=False)
    return shown.placed(media.processor.tokenizer.encode(rendered))


def as_user(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


def test_an_image_may_be_given_in_any_form(tmp_path: Path) -> None:
    picture, file = checkered(84, 56), BytesIO()
    picture.save(file, "PNG")
    picture.save(tmp_path / "a.png")
    url = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
    forms = [picture, str(tmp_path / "a.png"), url, file.getvalue(), {"bytes": url.partition(",")[2]}]
    for given in forms:
        ids = read(as_user({"type": "text", "text": "see"}, {"type": "image", "image": given}))
        assert [image.num_tokens for image in ids.images] == [6]
        assert read_image(ids.images[0].content).tobytes() == picture.tobytes()
    linked = {"type": "image_url", "image_url": {"url": url}}
    assert read(as_user(linked, {"type": "image", "path": str(tmp_path / "a.png")})).images[1].num_tokens == 6
    assert as_messages(picture) == [as_user({"type": "image", "image": picture})]
    assert as_messages([linked]) == [as_user(linked)]
    assert as_messages({"content": [linked]}) == [as_user(linked)]
    assert as_messages([{"type": "text", "text": "a"}] * 2) == [{"role": "user", "content": "aa"}]
    part = {"type": "image", "image": picture}
    text = {"type": "text", "text": "now"}
    assert as_messages(part) == as_messages([picture]) == [as_user(part)]
    assert as_messages(["now", picture, part]) == [as_user(text, part, part)]
    assert as_messages({"content": picture}) == as_messages([{"role": "user", "content": [part]}]) == [as_user(part)]
    assert as_messages([{"role": "user", "content": ["now", picture]}]) == [as_user(text, part)]
    for shown in (pixels := np.asarray(picture), [pixels], {"type": "image", "image": pixels}, {"content": [pixels]}):
        assert as_messages(shown) == [as_user(part)]
    assert as_messages(["now", pixels[:, ::-1]]) == as_messages(["now", picture.transpose(Image.FLIP_LEFT_RIGHT)])
    for wrong in (pixels[..., 0], pixels[..., :2], pixels.astype(np.float32), pixels[:0]):
        assert as_messages(wrong) is None
        assert as_messages([wrong]) is None
    assert as_messages(["a", "b"]) is None
    assert as_messages("a") == [{"role": "user", "content": "a"}]
    assert as_messages(("a", {})) is None


def test_what_cannot_be_shown_is_refused(tmp_path: Path) -> None:
    picture: dict[str, Any] = {"type": "image", "image": checkered(84, 56)}
    with pytest.raises(ValueError, match="shows an image, and the model takes none"):
        shown_in([as_user(picture)], None, None)
    for part in ({"type": "image"}, {"type": "video", "video": "a.npy"}):
        with pytest.raises(ValueError, match="has a part for a video, or for an image without the image"):
            read(as_user(part))
    for given, told in (
        (str(tmp_path / "gone.png"), "there is no image .*gone.png"),
        ("https://example.com/a.png", "there is no image https://example.com/a.png"),
        (b"broken", "the image of 6 bytes cannot be read"),
        ("data:image/png;base64,?", "an observation holds an image that is no base64"),
        (5, "an image is 5: it must be a PIL image, a path or a data URL"),
    ):
        with pytest.raises(MediaError, match=told):
            read(as_user({"type": "image", "image": given}))
    blind = "{% for message in messages %}{{ message['role'] }};{% endfor %}"
    with pytest.raises(ValueError, match=r"gives 0 places to the 1 image\(s\) of messages of the roles user"):
        read(as_user(picture), template=blind)
    with pytest.raises(ValueError, match="gives 2 places to the 1 image"):
        read(as_user(picture, {"type": "text", "text": "<|image_pad|>"}))
    assert image_content(Image.new("RGB", (2, 2))).startswith(b"\x89PNG")


class Shows(Screens):
    def reset(self, data: Prompt) -> Any:
        return screen("a")


class ShowsPixels(Screens):
    def reset(self, data: Prompt) -> Any:
        return np.asarray(screen("a"))


def test_an_environment_may_begin_with_the_pixels_of_an_image() -> None:
    def rendered(messages: Any, **_: Any) -> Any:
        raise InterruptedError(messages)

    message = {"role": "user", "content": "a"}
    data = Prompt(index=0, text="user:a;", token_ids=(2,), messages=(message,))
    engine: Any = SimpleNamespace(encode_prompt=rendered)
    with pytest.raises(InterruptedError) as raised:
        asyncio.run(EnvironmentWorkflow(environment=f"{__name__}:ShowsPixels").arun_episode(engine, data))
    image = {"type": "image", "image": screen("a")}
    assert raised.value.args[0] == [as_user({"type": "text", "text": "a"}, image)]


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"images": ("a.png",)}, r"so that reset\(data\) can only add a text"),
        ({"text": "a"}, "let a chat template render the prompts"),
    ],
)
def test_a_first_image_needs_a_rendered_prompt_without_images_of_its_own(changes: dict[str, Any], told: str) -> None:
    message = {"role": "user", "content": "a"}
    values: dict[str, Any] = {"index": 0, "text": "user:a;", "token_ids": (2,), "messages": (message,)}
    workflow = EnvironmentWorkflow(environment=f"{__name__}:Shows")
    engine: Any = SimpleNamespace(encode_prompt=None)
    with pytest.raises(ValueError, match=told):
        asyncio.run(workflow.arun_episode(engine, Prompt(**{**values, **changes})))
