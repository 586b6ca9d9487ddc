"""Prompts with images are computed once, and tokens of different images are never taken for each other."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image
from tiny_vlm import FAMILIES, IMAGE, VIDEO, checkered, frames, save_tiny_vlm, tiny_media, tiny_model
from torch.testing import assert_close

from lightrl.config import EvalConfig, GRPOConfig, OptimConfig
from lightrl.config.strategy import CheckpointConfig
from lightrl.metrics import Statistics
from lightrl.models.critic import ActorCritic, Critic, ValueHead
from lightrl.models.multimodal import MediaProcessor
from lightrl.models.policy import Policy, response_batch
from lightrl.records import EncodedPrompt, PackedBatch
from lightrl.sharing import images as sharing_images
from lightrl.sharing.images import distinct_images, identified, kept_features
from lightrl.sharing.model import attach_sharing, share_by_itself
from lightrl.sharing.tree import SharedBatch, share
from lightrl.strategy import create_strategy
from lightrl.testing import run_spmd
from lightrl.trainers.fit import build_trainer
from lightrl.trainers.grpo import GRPOTrainer

SCRIPT = Path(__file__).parents[2] / "scripts" / "train_grpo.py"
STRATEGY = create_strategy(GRPOConfig(strategy="single"))
TEXT = "what is to be seen here "
RED, BLUE = checkered(60, 90, seed=1), checkered(60, 90, seed=2)
COMPARED = ("loss", "grad_norm", "entropy", "kl", "ratio/mean")
EPS = 1e-4  # at Adam's own 1e-8 the rounding errors of gradients near 0 become whole steps


def encoded(media: MediaProcessor, text: str, images: list[Any], videos: list[Any] | None = None) -> EncodedPrompt:
    return media.encode(media.processor.tokenizer.encode(text), images, videos or [])


def batch_of(media: MediaProcessor, prompts: list[EncodedPrompt], lengths: tuple[int, ...] = (3, 5)) -> PackedBatch:
    """Returns a pack with responses of these lengths to each prompt."""
    draw = torch.Generator().manual_seed(0)
    of_samples = [prompt for prompt in prompts for _ in lengths]
    pairs = [
        (prompt.token_ids, torch.randint(2, 90, (length,), generator=draw).tolist())
        for prompt in prompts
        for length in lengths
    ]
    return response_batch(pairs, encoded=of_samples)


def mixed(family: str) -> PackedBatch:
    """Returns groups with an image, two, the same image in another prompt, another one, a video, and text alone."""
    media = tiny_media(family)
    prompts = [
        encoded(media, f"{TEXT}{IMAGE}?", [RED]),
        encoded(media, f"{TEXT}{IMAGE}{IMAGE}", [RED, BLUE]),
        encoded(media, f"{TEXT}{IMAGE}?", [RED]),
        encoded(media, f"{TEXT}{IMAGE}?", [BLUE]),
        encoded(media, f"{VIDEO}{TEXT}{IMAGE}", [BLUE], [frames(3, 40, 40)]),
        encoded(media, f"{TEXT}and nothing else", []),
    ]
    return batch_of(media, prompts)


def scored(model: Any, batch: PackedBatch) -> dict[str, torch.Tensor]:
    """Returns all scores, and the gradients of a random sum of them."""
    model.zero_grad()
    output = model(batch)
    found = {name: getattr(output, name, None) for name in ("logprobs", "entropy", "values", "final_values")}
    scores = {name: values for name, values in found.items() if isinstance(values, torch.Tensor)}
    torch.manual_seed(1)
    sum((values * torch.randn(values.shape)).sum() for values in scores.values()).backward()  # type: ignore[union-attr]
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {**{name: values.detach() for name, values in scores.items()}, **gradients}


def assert_alike(whole: dict[str, torch.Tensor], shared: dict[str, torch.Tensor]) -> None:
    assert whole.keys() == shared.keys()
    for name, value in whole.items():
        assert_close(shared[name], value, atol=1e-5 * max(1.0, value.abs().max().item()), rtol=1e-5, msg=name)


def with_head(make: Any, body: Any) -> Any:
    torch.manual_seed(2)
    head = ValueHead(64)
    torch.nn.init.normal_(head.weight)
    return make(body, head)


MODELS: dict[str, Any] = {
    "policy": lambda family: Policy(tiny_model(family)),
    "actor critic": lambda family: with_head(ActorCritic, tiny_model(family)),
    "critic": lambda family: with_head(Critic, tiny_model(family).model),
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", sorted(MODELS))
def test_scores_and_gradients_are_those_of_whole_sequences(kind: str, family: str) -> None:
    plain, asked, own = (MODELS[kind](family) for _ in range(3))
    attach_sharing(asked, STRATEGY)
    trainer: Any = SimpleNamespace(policy=own, strategy=STRATEGY, statistics=Statistics(), batches="")
    share_by_itself(trainer)
    batch = mixed(family)
    shared = share(batch)
    assert isinstance(shared, SharedBatch)
    wanted = scored(plain, batch)
    assert any("visual" in name and value.any() for name, value in wanted.items())
    assert_alike(wanted, scored(asked, shared))
    assert_alike(wanted, scored(own, batch))
    share_of = trainer.statistics.reduce(STRATEGY.comm)["tokens/computed_share"]
    assert share_of == len(shared.tree.kept) / batch.cu_seqlens[-1] < 0.6


@pytest.mark.parametrize("family", FAMILIES)
def test_gradient_checkpointing_goes_with_it(family: str) -> None:
    plain, checkpointed = (Policy(tiny_model(family)).train() for _ in range(2))
    checkpointed.hf.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    attach_sharing(checkpointed, STRATEGY)
    assert_alike(scored(plain, mixed(family)), scored(checkpointed, share(mixed(family))))


@pytest.mark.parametrize("family", FAMILIES)
def test_different_images_of_equal_token_ids_part_the_tree(family: str) -> None:
    media = tiny_media(family)
    red, blue = (encoded(media, f"{TEXT}{IMAGE}?", [image]) for image in (RED, BLUE))
    assert red.token_ids == blue.token_ids
    # Same again: another object with the same pixels, as two lines of a data set that name one file.
    again = encoded(media, f"{TEXT}{IMAGE}?", [RED])
    before = len(media.processor.tokenizer.encode(f"{TEXT}<|vision_start|>"))
    length = len(red.token_ids)
    for other, alike in ((blue, before), (again, length)):
        batch = share(batch_of(media, [red, other], lengths=(4,)))
        assert isinstance(batch, SharedBatch)
        assert len(batch.tree.kept) == 2 * (length + 4) - alike
    policy = Policy(tiny_model(family))
    attach_sharing(policy, STRATEGY)
    batch = batch_of(media, [red, blue])
    assert_alike(scored(Policy(tiny_model(family)), batch), scored(policy, share(batch)))


def test_equal_images_of_several_prompts_go_through_the_vision_tower_once() -> None:
    batch = mixed("qwen2_5_vl")
    assert batch.vision is not None
    distinct = distinct_images(batch.vision)
    # Red; red and blue; red; blue; a video and blue: five images more than there are.
    assert (len(batch.vision.grid_thw), len(distinct.grid_thw)) == (7, 3)
    policy, patches = Policy(tiny_model("qwen2_5_vl")), []
    policy.hf.model.visual.register_forward_pre_hook(lambda _, args: patches.append(len(args[0])))
    whole, once = policy(batch).logprobs, policy(replace(batch, vision=distinct)).logprobs
    assert_close(once, whole, atol=1e-5, rtol=0)
    assert patches == [len(batch.vision.pixel_values), len(distinct.pixel_values)]
    assert patches[1] < 0.5 * patches[0]
    assert distinct_images(distinct) is distinct


def test_images_of_equal_pixels_and_another_grid_are_different() -> None:
    batch = mixed("qwen2_5_vl")
    assert batch.vision is not None
    height, width = batch.vision.grid_thw[0, 1:].tolist()
    turned = batch.vision.grid_thw.clone()
    turned[0] = torch.tensor([1, width, height])
    assert height != width
    assert len(distinct_images(replace(batch.vision, grid_thw=turned)).grid_thw) == 4


def test_keys_and_features_by_hand() -> None:
    """Two samples of one prompt: token 7, then two features of its image, then a response."""
    media = tiny_media("qwen2_5_vl")
    prompt = replace(
        encoded(media, IMAGE, [checkered(28, 28)]),
        token_ids=(7, 9, 9),
        positions=torch.zeros(3, 3, dtype=torch.int64),
        feature_positions=torch.tensor([1, 2]),
        pixel_values=torch.zeros(8, 5),
        grid_thw=torch.tensor([[1, 4, 2]]),
    )
    batch = response_batch([(prompt.token_ids, (3,)), (prompt.token_ids, (4,))], encoded=[prompt, prompt])
    assert batch.vision is not None
    _, keys = identified(batch, batch.vision)
    assert keys.tolist() == [7, -1, -2, 3, 7, -1, -2, 4]
    kept = kept_features(batch.vision, torch.tensor([4, 5, 6, 3, 7]), num_tokens=8)
    assert (kept.feature_positions.tolist(), kept.feature_index.tolist()) == ([1, 2], [0, 1])


@pytest.mark.parametrize("family", FAMILIES)
def test_the_check_of_a_model_tells_images_apart(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharing_images, "_digest", lambda patches, grid: b"")
    with pytest.raises(ValueError, match="scores of a few tokens differ by"):
        attach_sharing(Policy(tiny_model(family)), STRATEGY)


# ---- Runs


@pytest.fixture(scope="module", params=FAMILIES)
def toy(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny model, prompts whose texts are equal and whose images are not, one without, and a reward."""
    folder = tmp_path_factory.mktemp(request.param)
    save_tiny_vlm(folder / "model", request.param)
    lines = []
    for color in ("red", "blue"):
        Image.new("RGB", (56, 84), color).save(folder / f"{color}.png")
        lines.append({"prompt": f"{TEXT}{IMAGE}", "images": [f"{color}.png"]})
    lines.append({"prompt": f"{TEXT}but an image"})
    (folder / "train.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "reward.py").write_text("def letters(sample):\n    return sum(map(str.isalpha, sample.text)) / 8\n")
    return folder


def options(toy: Path, folder: Path) -> dict[str, Any]:
    return {
        "model": str(toy / "model"),
        "train_data": str(toy / "train.jsonl"),
        "reward": (f"{toy / 'reward.py'}:letters",),
        "output_dir": str(folder),
        "strategy": "single",
        "num_prompts": 3,
        "group_size": 4,
        "num_minibatches": 1,
        "max_new_tokens": 6,
        "lr": 1e-3,
        "optim": OptimConfig(eps=EPS),
        "checkpoint": CheckpointConfig(every=0),
        "eval": EvalConfig(every=0),
    }


def stepped(toy: Path, folder: Path, **way: Any) -> list[dict[str, float]]:
    """Returns the metrics of two steps."""
    trainer: Any = build_trainer(GRPOTrainer, GRPOConfig(**options(toy, folder), **way))
    metrics = [trainer.step().metrics, trainer.step().metrics]
    trainer.close()
    return metrics


def assert_rows_alike(whole: dict[str, float], shared: dict[str, float]) -> None:
    assert "tokens/computed_share" not in whole
    assert shared["tokens/computed_share"] < 0.6
    assert whole["reward/mean"] == shared["reward/mean"]
    for metric in whole.keys() & set(COMPARED):
        assert shared[metric] == pytest.approx(whole[metric], abs=5e-6, rel=2e-5), metric


def test_a_run_with_images_learns_the_same(toy: Path, tmp_path: Path) -> None:
    whole = stepped(toy, tmp_path / "whole", share_prompts=False)
    assert whole[0]["grad_norm"] > 0
    for index, way in enumerate(({}, {"share_prompts": True}, {"share_prompts": True, "micro_batch_size": 5})):
        for one, other in zip(whole, stepped(toy, tmp_path / str(index), **way), strict=True):
            assert_rows_alike(one, other)


@pytest.mark.slow
def test_two_ranks_with_images_learn_the_same(toy: Path, tmp_path: Path) -> None:
    (whole, _) = stepped(toy, tmp_path / "whole", share_prompts=False)
    for way, split in product(("auto", "True"), ("1", "2")):
        folder = tmp_path / (way + split)
        flags = [
            *("--model", str(toy / "model"), "--train_data", str(toy / "train.jsonl"), "--lr", "1e-3"),
            *("--reward", f"{toy / 'reward.py'}:letters", "--num_prompts", "3", "--group_size", "4"),
            *("--num_minibatches", "1", "--max_new_tokens", "6", "--optim.eps", str(EPS), "--max_steps", "1"),
            *("--checkpoint.every", "0", "--eval.every", "0", "--strategy", "fsdp", "--sp_size", split),
        ]
        run_spmd(SCRIPT, *flags, "--share_prompts", way, "--output_dir", str(folder), world_size=2, timeout_s=200)
        (row,) = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        assert_rows_alike(whole, row)
