"""Models whose frequencies transformers would choose by the longest sequence of a call: packed must equal alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import transformers
from torch.testing import assert_close
from transformers import PreTrainedModel

from lightrl.engines.base import SamplingParams
from lightrl.engines.native.engine import NativeEngine, empty_copy
from lightrl.models.fixed_rope import fix_frequencies, fixed_length, original_length, original_lengths
from lightrl.models.packed_attention import varies_with_length
from lightrl.models.policy import Policy, response_batch
from lightrl.models.score_check import check_scores
from lightrl.records import PackedBatch

CPU = torch.device("cpu")
VOCAB, ORIGINAL, CONTEXT = 61, 16, 64
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LONGROPE: dict[str, Any] = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0, 1.0, 1.5, 2.0],
    "long_factor": [2.0, 4.0, 8.0, 16.0],
    "original_max_position_embeddings": ORIGINAL,
}
MODELS = {
    "phi3": lambda: transformers.Phi3Config(
        **SHAPE, max_position_embeddings=CONTEXT, rope_parameters=LONGROPE, original_max_position_embeddings=ORIGINAL
    ),
    "phimoe": lambda: transformers.PhimoeConfig(
        **SHAPE,
        max_position_embeddings=CONTEXT,
        num_local_experts=4,
        rope_parameters={**LONGROPE, "short_mscale": 1.2, "long_mscale": 1.3},
    ),
    "llama_dynamic": lambda: transformers.LlamaConfig(
        **SHAPE,
        max_position_embeddings=ORIGINAL,
        rope_parameters={"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4},
    ),
    "gemma3_dynamic": lambda: transformers.Gemma3TextConfig(  # a rope for each kind of layer
        **SHAPE,
        head_dim=8,
        max_position_embeddings=ORIGINAL,
        sliding_window=8,
        layer_types=["full_attention", "sliding_attention"],
        rope_parameters={
            "full_attention": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    ),
}
LENGTHS = ((3, 4), (5, 30), (4, 5))  # tokens of prompts and responses, on both sides of ORIGINAL


def tiny_model(name: str) -> PreTrainedModel:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(MODELS[name]())
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    result: PreTrainedModel = model.eval()
    return result


def fixed_policy(name: str, longest: int | None = None) -> Policy:
    policy = Policy(tiny_model(name))
    if longest is not None:
        fix_frequencies(policy, longest)
    return policy.eval()


def pairs(lengths: Sequence[tuple[int, int]] = LENGTHS) -> list[tuple[list[int], list[int]]]:
    draw = torch.Generator().manual_seed(1)

    def ids(count: int) -> list[int]:
        return torch.randint(3, VOCAB, (count,), generator=draw).tolist()

    return [(ids(prompt), ids(response)) for prompt, response in lengths]


def gradient(policy: Policy, batches: Sequence[PackedBatch]) -> torch.Tensor:
    policy.zero_grad()
    torch.stack([policy(batch).logprobs.sum() for batch in batches]).sum().backward()
    return torch.cat([p.grad.flatten() for p in policy.parameters() if p.grad is not None])


@pytest.mark.parametrize("name", sorted(MODELS))
@pytest.mark.parametrize("longest", [12, None, 48])
def test_a_sequence_has_the_scores_that_it_has_alone(name: str, longest: int | None) -> None:
    policy = fixed_policy(name, longest)
    together = policy(response_batch(pairs())).logprobs
    alone = torch.cat([policy(response_batch([pair])).logprobs for pair in pairs()])
    assert_close(together, alone, atol=1e-5, rtol=0)
    whole = gradient(policy, [response_batch(pairs())])
    split = gradient(policy, [response_batch([pair]) for pair in reversed(pairs())])
    assert_close(whole, split, atol=1e-4 * float(whole.abs().max()), rtol=0)


@pytest.mark.parametrize("name", ["phi3", "llama_dynamic", "gemma3_dynamic"])
@pytest.mark.parametrize(("longest", "length"), [(ORIGINAL, ORIGINAL), (ORIGINAL + 20, ORIGINAL + 20)])
def test_the_frequencies_are_those_of_transformers_for_the_longest_sequence(
    name: str, longest: int, length: int
) -> None:
    ids = torch.tensor([pairs([(length - 1, 1)])[0][0] + [5]])
    with torch.no_grad():
        theirs = tiny_model(name)(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
        ours = fixed_policy(name, longest)(response_batch([(ids[0, :1].tolist(), ids[0, 1:].tolist())])).logprobs
    assert_close(ours, theirs, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", sorted(MODELS))
@pytest.mark.parametrize("longest", [12, 48])
def test_trainer_and_engine_agree_on_both_sides_of_the_length(name: str, longest: int) -> None:
    policy = fixed_policy(name, longest)
    copy = empty_copy(policy.hf, torch.float32, CPU)
    assert fixed_length(copy) == longest
    engine = NativeEngine(copy, eos_token_ids=[2], device=CPU)
    engine.load_weights(((name, p.detach()) for name, p in policy.hf.named_parameters()), version=0)
    room = engine.max_model_len - 8
    prompts = [prompt for prompt, _ in pairs()]
    params = [SamplingParams(max_new_tokens=count, ignore_eos=True) for count in (3, room, 6)]
    done = engine.generate(prompts, params)
    for completion in done:
        batch = response_batch([(completion.prompt_token_ids, completion.output_token_ids)])
        with torch.no_grad():
            ours = policy(batch).logprobs
        assert_close(torch.tensor(completion.logprobs), ours, atol=5e-5, rtol=0)


def test_an_engine_of_its_own_is_fixed_by_the_longest_sequence_that_it_takes() -> None:
    model = tiny_model("phi3")
    NativeEngine(model, eos_token_ids=[2], device=CPU, max_model_len=12)
    assert fixed_length(model) == 12


@pytest.mark.parametrize(("longest", "scale"), [(ORIGINAL, 1.2), (ORIGINAL + 1, 1.3)])
def test_the_scale_of_phimoe_changes_above_the_length(longest: int, scale: float) -> None:
    [rotary] = [module for module in fixed_policy("phimoe", longest).modules() if hasattr(module, "fixed_rope")]
    assert rotary.rope_init_fn(rotary.config, CPU)[1] == scale  # type: ignore[operator]


def test_a_length_may_stand_in_the_rope_or_beside_it() -> None:
    beside: Any = transformers.LlamaConfig(**SHAPE)
    assert original_lengths(beside) == []
    beside.original_max_position_embeddings = 12
    assert original_lengths(beside) == [12]
    beside.rope_parameters = {**LONGROPE}
    assert original_lengths(beside) == [12, ORIGINAL]


def test_only_models_whose_frequencies_vary_are_touched() -> None:
    plain = transformers.LlamaConfig(**SHAPE)
    assert not varies_with_length(plain)
    assert original_length(plain) is None
    policy = Policy(transformers.LlamaForCausalLM(plain))
    assert fixed_length(policy) is None
    assert fixed_length(fixed_policy("phi3")) == CONTEXT
    assert original_length(MODELS["phi3"]()) == ORIGINAL


def test_check_scores_passes_for_fixed_models() -> None:
    for name in MODELS:
        check_scores(fixed_policy(name), CPU)
