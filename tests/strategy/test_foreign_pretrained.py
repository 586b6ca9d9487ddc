"""Programs that name their model in args: an actor around it, no actor, no tokenizer, and the engine awake for good."""

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close
from transformers import AutoModelForCausalLM, AutoTokenizer

from lightrl.builtin.model import tiny_model
from lightrl.engines.colocated import EngineStatus
from lightrl.strategy.layout.plain import innermost
from lightrl.strategy.torch_native import SingleStrategy


class Actor(nn.Module):
    """As other trainers wrap a network: in `.model`, with a forward of its own."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)

    def forward(self, sequences: Tensor, attention_mask: Tensor) -> Tensor:
        logits: Tensor = self.model(input_ids=sequences, attention_mask=attention_mask).logits
        return logits[:, :-1].log_softmax(-1).gather(2, sequences[:, 1:, None])[..., 0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    for part in tiny_model():
        part.save_pretrained(path)
    return path


def started(folder: Path, **options: Any) -> tuple[SingleStrategy, Namespace]:
    args = Namespace(pretrain=str(folder), actor_learning_rate=0.1, **options)
    strategy = SingleStrategy(seed=0, max_norm=None, micro_train_batch_size=1, train_batch_size=1, args=args)  # type: ignore[arg-type]
    strategy.setup_distributed()
    return strategy, args


def test_an_actor_that_keeps_its_network_in_model(folder: Path, tmp_path: Path) -> None:
    strategy, args = started(folder, enable_engine_sleep=False)
    (actor, optimizer, scheduler), _, rewards, _ = strategy.prepare_models_and_optimizers(
        Actor(folder), None, {"length": nn.Linear(1, 1), "style": nn.ModuleList([nn.Linear(1, 1)])}, None, args, 4
    )
    assert sorted(rewards) == ["length", "style"]
    assert isinstance(rewards["style"], nn.ModuleList)
    assert not any(p.requires_grad for model in rewards.values() for p in model.parameters())
    assert strategy.unwrap_model(actor) is actor.model
    assert "lm_head.weight" in dict(strategy.full_parameters(actor)) or "model.embed_tokens.weight" in dict(
        strategy.full_parameters(actor)
    )
    strategy.setup_inference_engine(args, engine_type="native", actor=actor)
    first = strategy.gather_and_generate({"max_tokens": 4, "temperature": 0.0}, all_prompts=["1+2="])
    assert strategy.engine is not None
    assert strategy.engine.status is EngineStatus.WAKEUP  # enable_engine_sleep=False: it never sleeps
    strategy.maybe_sleep_inference_engine()
    assert strategy.engine.status is EngineStatus.WAKEUP
    ids = torch.tensor([first[0].prompt_token_ids + first[0].output_token_ids])
    scores = actor(ids, torch.ones_like(ids))[0, -len(first[0].output_token_ids) :]
    assert_close(scores.detach(), torch.tensor(first[0].logprobs), atol=1e-5, rtol=0)
    strategy.backward(-scores.mean(), actor, optimizer)
    strategy.optimizer_step(optimizer, actor, scheduler)
    strategy.update_engine_weights(actor)
    again = strategy.gather_and_generate({"max_tokens": 4, "temperature": 0.0}, all_prompts=["1+2="])
    assert sum(again[0].logprobs) > sum(first[0].logprobs)
    strategy.save_ckpt(actor, str(tmp_path), client_state={"step": 1})
    assert strategy.load_ckpt(actor, str(tmp_path))[1] == {"step": 1}
    strategy.close()


def test_an_engine_without_an_actor_has_the_weights_that_args_name(folder: Path) -> None:
    strategy, args = started(folder)
    strategy.setup_inference_engine(args, "native", actor=None)
    ids = AutoTokenizer.from_pretrained(folder).encode("1+2=")
    texts = strategy.gather_and_generate({"max_tokens": 6, "temperature": 0.0}, all_prompts=["1+2="])
    both = strategy.gather_and_generate({"max_tokens": 6, "temperature": 0.0}, [ids], ["another text"])
    assert texts[0].prompt_token_ids == both[0].prompt_token_ids == ids  # without an image the ids count
    assert texts[0].output_token_ids == both[0].output_token_ids
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        assert int(model(torch.tensor([ids])).logits[0, -1].argmax()) == texts[0].output_token_ids[0]
    with pytest.raises(ValueError, match="1 prompts in all_prompt_token_ids and 2 in all_prompts"):
        strategy.gather_and_generate({}, [ids], ["a", "b"])
    with pytest.raises(ValueError, match="neither was given"):
        strategy.gather_and_generate({})
    strategy.close()
    nothing = SingleStrategy(0, 1.0, 1, 1)
    nothing.setup_distributed()
    with pytest.raises(ValueError, match="The engine needs a model: prepare the actor first"):
        nothing.setup_inference_engine(None, "native")


def test_stop_strings_cut_tokens_and_text(folder: Path) -> None:
    strategy, args = started(folder)
    strategy.setup_inference_engine(args, "native")
    params = {"max_tokens": 12, "temperature": 1.0, "seed": 1, "ignore_eos": True}
    (free,) = strategy.gather_and_generate(params, all_prompts=["1+2="])
    stop = free.text[3]
    at = free.text.index(stop)
    (cut,) = strategy.gather_and_generate({**params, "stop": stop}, all_prompts=["1+2="])
    assert cut.finish_reason == "stop"
    assert cut.output_token_ids == free.output_token_ids[: len(cut.output_token_ids)]
    assert len(cut.logprobs) == len(cut.versions) == len(cut.output_token_ids) < 12
    assert cut.text == free.text[:at]
    (kept,) = strategy.gather_and_generate(
        {**params, "stop": [stop], "include_stop_str_in_output": True}, all_prompts=["1+2="]
    )
    assert kept.text == free.text[: at + 1]
    assert cut.is_trainable
    strategy.close()


def test_samples_that_cannot_be_trained_are_marked_or_refused(folder: Path) -> None:
    strategy, args = started(folder)
    strategy.setup_inference_engine(args, "native")
    params = {"max_tokens": 4, "repetition_penalty": 1.3, "min_tokens": 2}
    (item,) = strategy.gather_and_generate(params, all_prompts=["1+2="], sleep_engine=False)
    assert not item.is_trainable
    (item,) = strategy.engine_generate_local({"max_tokens": 4, "temperature": 0.7}, prompt_token_ids=[[3, 4]])
    assert item.is_trainable
    with pytest.raises(ValueError, match=r"min_new_tokens=2, repetition_penalty=1.3: a trainer computes logprobs at"):
        strategy.gather_and_generate(params, all_prompts=["1+2="], for_training=True)
    strategy.close()


def test_what_is_underneath_a_wrapper(folder: Path) -> None:
    actor = Actor(folder)
    assert innermost(nn.ModuleDict({"module": actor})["module"]) is actor.model
    assert innermost(actor.model) is actor.model  # whose own `.model` is its body
    plain = nn.Module()
    plain.model = nn.Linear(1, 1)  # no transformers model: it may have heads beside it
    assert innermost(plain) is plain
