"""Models that cannot run whole packs score and train as if each sequence were alone."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
import transformers
from packaging.version import Version
from tiny_hybrids import APART, BY_MIXER, FAMILIES, VOCAB, own_logprobs, tiny_model
from torch import Tensor
from torch.testing import assert_close
from transformers import AutoModel, AutoModelForCausalLM, ModernBertDecoderConfig, PreTrainedModel

from lightrl.models.critic import Critic, ValueHead
from lightrl.models.packed_attention import packed_hidden_states, packed_layout
from lightrl.models.per_sequence import RUNS_APART, _say_once, _sequences
from lightrl.models.policy import Policy, response_batch
from lightrl.models.score_check import check_scores

CPU = torch.device("cpu")
LENGTHS = ((3, 4), (3, 4), (6, 9), (1, 1), (12, 15))  # of prompts and responses: equal neighbours, one token, long


def random_pairs() -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    draw = torch.Generator().manual_seed(0)
    return [
        (
            tuple(torch.randint(3, VOCAB, (a,), generator=draw).tolist()),
            tuple(torch.randint(3, VOCAB, (b,), generator=draw).tolist()),
        )
        for a, b in LENGTHS
    ]


def gradients(model: PreTrainedModel, logprobs: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    (logprobs * torch.linspace(-1, 1, len(logprobs))).sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_a_pack_equals_each_sequence_alone(family: str) -> None:
    model, pairs = tiny_model(family), random_pairs()
    expected = torch.cat([own_logprobs(model, *pair) for pair in pairs])
    expected_gradients = gradients(model, expected)
    policy = Policy(model)
    check_scores(policy, CPU)
    takes_packs = family == "gptj" and Version(transformers.__version__) >= Version("5.24")
    assert (RUNS_APART in model.get_decoder().__dict__) == (family in APART and not takes_packs)
    for checkpointing in (False, True):
        if checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        logprobs = policy.train()(response_batch(pairs)).logprobs
        found = gradients(model, logprobs)
        assert_close(logprobs, expected, atol=1e-5, rtol=0)
        assert found.keys() == expected_gradients.keys()
        largest = max(gradient.abs().max().item() for gradient in expected_gradients.values())
        for name, gradient in expected_gradients.items():
            assert_close(found[name], gradient, atol=1e-5 * largest, rtol=1e-4, msg=name)


@pytest.mark.parametrize("family", ["qwen3_next", "bloom"])
def test_a_copy_runs_its_own_weights(family: str) -> None:
    policy, batch = Policy(tiny_model(family)), response_batch(random_pairs())
    twin = copy.deepcopy(policy)
    before = twin(batch).logprobs.detach()
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.zero_()
    assert_close(twin(batch).logprobs.detach(), before, atol=0, rtol=0)
    assert policy(batch).logprobs.std() < 1e-6  # every token alike


def test_a_critic_values_each_sequence_alone() -> None:
    body = AutoModel.from_config(BY_MIXER["lfm2"]()).eval()
    critic, pairs = Critic(body, ValueHead(32)), random_pairs()
    together = critic(response_batch(pairs)).values
    alone = torch.cat([critic(response_batch([pair])).values for pair in pairs])
    assert_close(together, alone, atol=1e-5, rtol=0)


def test_a_model_that_sees_later_tokens_is_refused() -> None:
    class SeesAll(torch.nn.Module):
        def forward(self, hidden: Tensor) -> Tensor:
            return hidden + hidden.mean(1, keepdim=True)

    model = tiny_model("bloom")
    model.transformer.ln_f = SeesAll()
    with pytest.raises(ValueError, match="mixes tokens"):
        check_scores(Policy(model), CPU)


def test_a_model_with_layers_between_decoder_and_output_is_refused() -> None:
    config = ModernBertDecoderConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        pad_token_id=0,
    )  # fmt: skip
    with pytest.raises(ValueError, match="'modernbert-decoder' cannot be trained: get_decoder.* gives a Linear"):
        Policy(AutoModelForCausalLM.from_config(config))


def test_a_model_that_fails_on_tokens_is_refused_in_one_sentence() -> None:
    model = tiny_model("bloom")
    model.transformer.ln_f = torch.nn.LayerNorm(5)
    with pytest.raises(ValueError, match=r"'bloom' cannot be trained: it fails on a few .* \(RuntimeError: .*shape"):
        check_scores(Policy(model), CPU)


def test_rwkv_keeps_its_weights_where_it_does_not_train() -> None:
    model, pairs = tiny_model("rwkv"), random_pairs()
    model.config.rescale_every = 1  # halves those of the second layer in the first evaluation, in place
    expected = torch.cat([own_logprobs(model.train(), *pair) for pair in pairs])
    weights = {name: weight.clone() for name, weight in model.named_parameters()}
    own_logprobs(model.eval(), *pairs[0])
    assert not torch.equal(
        model.rwkv.blocks[1].attention.output.weight, weights["rwkv.blocks.1.attention.output.weight"]
    )
    policy = Policy(model)
    assert_close(policy.eval()(response_batch(pairs)).logprobs, expected, atol=1e-5, rtol=0)
    assert all(torch.equal(weight, weights[name]) for name, weight in model.named_parameters())


def test_the_log_says_it_once(caplog: pytest.LogCaptureFixture) -> None:
    _say_once.cache_clear()
    with caplog.at_level(logging.WARNING):
        for family in ("bloom", "mamba", "bloom"):
            Policy(tiny_model(family))
    ours = [record.getMessage() for record in caplog.records if record.name.startswith("lightrl")]
    assert ours == [
        "bloom cannot run whole packs: the model runs each sequence alone: exact, slower.",
        "mamba cannot run whole packs: its recurrent layers run each sequence alone: exact, slower.",
    ]


def test_ranks_that_split_a_sequence_are_refused() -> None:
    class Group:
        size, rank = 2, 0

    model = tiny_model("mamba")
    Policy(model)
    batch = response_batch([((5, 6), (7, 8))])
    with pytest.raises(ValueError, match="Leave it at 1"):
        packed_hidden_states(model.get_decoder(), batch, group=Group())


def test_a_mask_is_refused() -> None:
    layout = packed_layout((0, 2, 4), CPU)
    with pytest.raises(ValueError, match="given a mask"):
        list(_sequences({"hidden_states": torch.zeros(1, 4, 3), "mask": torch.zeros(4, 4)}, layout))
