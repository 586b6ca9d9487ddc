"""A tiny classifier as the reward, against transformers' own scores of unpadded sequences."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import model_reward_program
import pytest
import torch
from reward_samples import answered
from transformers import AutoModelForSequenceClassification, Qwen3Config, Qwen3ForSequenceClassification

from lightrl.builtin.model import builtin_tokenizer, tiny_model
from lightrl.config import GRPOConfig
from lightrl.records import Sample
from lightrl.rewards.model_reward import ModelReward
from lightrl.rewards.reward_set import RewardSet
from lightrl.strategy import create_strategy
from lightrl.testing import run_spmd

TEMPLATE = (
    "{{ '1' if tools }}{% for m in messages %}{{ '+' if m.role == 'user' else '=' }}{{ m.content }}{% endfor %}<eos>"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("classifier")
    torch.manual_seed(0)
    tokenizer = builtin_tokenizer()
    config = Qwen3Config(
        vocab_size=len(tokenizer), pad_token_id=tokenizer.pad_token_id, hidden_size=16, intermediate_size=24,
        num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=8, max_position_embeddings=64,
        num_labels=1,
    )  # fmt: skip
    Qwen3ForSequenceClassification(config).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def expected(folder: Path, ids: list[list[int]]) -> list[float]:
    """By the model's own forward, one sequence at a time."""
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        return [float(model(input_ids=torch.tensor([row])).logits[0, 0]) for row in ids]


@pytest.mark.parametrize(("world_size", "strategy"), [(1, "single"), (2, "fsdp")])
def test_scores_are_those_of_transformers_on_every_strategy(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, world_size: int, strategy: str
) -> None:
    out = tmp_path / "scores.json"
    args = [str(folder), strategy, str(out)]
    if world_size == 1:
        monkeypatch.setattr("sys.argv", ["program", *args])
        model_reward_program.main()
    else:
        run_spmd(model_reward_program.__file__, *args, world_size=world_size, timeout_s=240)
    found = json.loads(out.read_text())
    tokenizer = builtin_tokenizer()
    wanted = expected(
        folder, [[*tokenizer("3+" + text)["input_ids"], tokenizer.eos_token_id] for text in model_reward_program.TEXTS]
    )
    assert len({round(score, 4) for score in wanted}) == len(wanted)  # they can be told apart
    for name in ("uneven", "shared"):
        assert found[name] == pytest.approx(wanted, abs=1e-5)
        assert found[f"{name} mean"] == pytest.approx(sum(wanted) / len(wanted), abs=1e-5)


def ids_of(reward: ModelReward, sample: Sample) -> list[int]:
    return reward._token_ids(sample)


def test_the_end_token_is_there_once_or_not_at_all(folder: Path) -> None:
    tokenizer = builtin_tokenizer()
    end: Any = tokenizer.eos_token_id
    plain = tokenizer("1+2=3")["input_ids"]
    ended, cut = (answered("3", prompt_text="1+2=", finish_reason=reason) for reason in ("stop", "length"))
    for append, for_ended, for_cut in (
        ("auto", [*plain, end], plain),
        ("always", [*plain, end], [*plain, end]),
        ("never", plain, plain),
    ):
        reward = ModelReward(path=str(folder), append_eos=append)  # type: ignore[arg-type]
        assert ids_of(reward, ended) == for_ended
        assert ids_of(reward, cut) == for_cut


def test_with_the_policys_tokenizer_its_tokens_are_taken_and_else_made_anew(folder: Path) -> None:
    strategy = create_strategy(GRPOConfig(strategy="single"))
    strategy.setup_distributed()
    reward = ModelReward(path=str(folder))
    sample = answered("3", prompt_text="1+2=", num_tokens=3)  # its ids say (1), (7, 7, 7); its text something else
    strategy.tokenizer = builtin_tokenizer()
    reward.prepare(strategy)
    end: Any = reward._tokenizer.eos_token_id
    assert ids_of(reward, sample) == [1, 7, 7, 7, end]
    other = builtin_tokenizer()
    other.add_tokens(["?"])
    strategy.tokenizer = other
    reward.prepare(strategy)
    assert ids_of(reward, sample) == [*reward._tokenizer("1+2=3")["input_ids"], end]


def test_a_template_of_the_models_own_renders_the_conversation(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    import shutil
    from dataclasses import replace

    shutil.copytree(folder, tmp_path / "model")
    tokenizer = builtin_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(tmp_path / "model")
    sample = answered("7", prompt_text="rendered by the policy's", finish_reason="length")
    sample = replace(sample, prompt=replace(sample.prompt, messages=({"role": "user", "content": "34"},)))
    reward = ModelReward(path=str(tmp_path / "model"))
    assert ids_of(reward, sample) == tokenizer("+34=7<eos>")["input_ids"]
    described = replace(sample, prompt=replace(sample.prompt, fields={"tools": [{"name": "f"}]}))
    assert ids_of(reward, described) == tokenizer("1+34=7<eos>")["input_ids"]
    assert "leaves out" not in caplog.text
    reward._tokenizer.chat_template = TEMPLATE.replace("in messages", "in messages if m.role == 'assistant'")
    assert ids_of(reward, sample) == tokenizer("=7<eos>")["input_ids"]
    assert "the reward model's prompts: the chat template leaves out the text of a message of the role" in caplog.text
    with pytest.raises(ValueError, match="chat_template is always, and the tokenizer in .* has no template"):
        ModelReward(path=str(folder), chat_template="always")


def test_what_is_too_long_fails_alone(folder: Path) -> None:
    strategy = create_strategy(GRPOConfig(strategy="single"))
    strategy.setup_distributed()
    reward = ModelReward(path=str(folder))
    reward.prepare(strategy)
    long, short = reward([answered("1" * 64, prompt_text="1"), answered("3", prompt_text="1+2=")])
    assert "prompt and response have 66 tokens, and the reward model takes 64" in str(long)
    assert isinstance(short, float)
    assert reward([]) == []


def test_a_token_that_only_the_tokenizer_has_fails_alone(folder: Path, tmp_path: Path) -> None:
    model = shutil.copytree(folder, tmp_path / "model")
    tokenizer = builtin_tokenizer()
    tokenizer.add_tokens(["~"])
    tokenizer.save_pretrained(model)
    strategy = create_strategy(GRPOConfig(strategy="single"))
    strategy.setup_distributed()
    reward = ModelReward(path=str(model))
    reward.prepare(strategy)
    unknown, known = reward([answered("3~", prompt_text="1+2="), answered("3", prompt_text="1+2=")])
    assert "the token '~' has the id 14, and the reward model's ids end at 13" in str(unknown)
    assert isinstance(known, float)


def test_what_gives_no_score_is_refused_at_once(folder: Path, tmp_path: Path) -> None:
    model, tokenizer = tiny_model()
    model.save_pretrained(tmp_path / "lm")
    tokenizer.save_pretrained(tmp_path / "lm")
    with pytest.raises(ValueError, match=r"--reward_model .* is Qwen3ForCausalLM, which gives no score"):
        RewardSet.from_config(GRPOConfig(reward=("reward_model",), reward_model=str(tmp_path / "lm")))
    with pytest.raises(FileNotFoundError, match="--reward_model ./absent: there is no such folder"):
        RewardSet.from_config(GRPOConfig(reward=("reward_model",), reward_model="./absent"))
    for name in ("config.json", "tokenizer.json"):
        damaged = tmp_path / name.partition(".")[0]
        shutil.copytree(folder, damaged)
        (damaged / name).write_text("{")
        with pytest.raises(ValueError, match=r"^--reward_model .* cannot be read"):
            ModelReward(path=str(damaged))
    with pytest.raises(ValueError, match="needs --reward_model, the folder or name"):
        RewardSet.from_config(GRPOConfig(reward=("reward_model",)))
    with pytest.raises(ValueError, match="append_eos is 'maybe': choose one of auto, always, never"):
        ModelReward(path=str(folder), append_eos="maybe")  # type: ignore[arg-type]
