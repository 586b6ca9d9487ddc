"""--native.cpu_kernels: compiled kernels decode as the fused forward and the model do."""

from __future__ import annotations

import gc
import logging
import sys
import weakref

import numpy as np
import pytest
import torch
from torch import nn
from torch.testing import assert_close
from transformers import Qwen3Config, Qwen3ForCausalLM

from lightrl.c_library import find_compiler
from lightrl.config import StrategyOptions
from lightrl.config.native import NativeEngineConfig
from lightrl.engines.base import EngineGroup, SamplingParams
from lightrl.engines.native.adapted import AdaptedForward
from lightrl.engines.native.cache import LayerStorage, RowCache
from lightrl.engines.native.engine import NativeEngine, build_native_engine
from lightrl.engines.native.forward import FusedForward, RMSNorm
from lightrl.engines.native.kernels import KernelForward, _queries_together, engine_with_kernels
from lightrl.engines.native.lent import LentEngine
from lightrl.engines.native.row_adapters import NO_ADAPTER, ChosenAdapters, MixedRows
from lightrl.engines.native.sampler import PLAIN, SAMPLING, plan_sampling, sample
from lightrl.engines.weights.adapters import Factors


def has_compiler():
    try:
        return bool(find_compiler())
    except RuntimeError:
        return False


pytestmark = pytest.mark.skipif(not has_compiler(), reason="needs a C compiler")

CPU = torch.device("cpu")
SETTINGS = {"eos_token_ids": [2], "device": CPU}
PROMPTS = [[5, 6, 7, 8], [9, 10], [3, 4] * 20]
FAMILIES = ("llama", "qwen2", "qwen3", "mistral")  # without norms, with biases, with norms, with a window


def shaped_model(dim, heads, kv_heads, hidden=32, inner=48, vocab_size=61):
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=2,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=dim,
    )
    return Qwen3ForCausalLM(config).eval()


@torch.inference_mode()
def logits_and_cache(forward, lengths, num_steps):
    """Returns the logits of each step, and the keys and values, of rows with prompts of these lengths."""
    cache, longest = RowCache(), max(lengths)
    cache.reserve(len(lengths), longest + num_steps, len(lengths), longest + num_steps)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 61, (len(lengths), longest + num_steps), generator=generator)
    rows = torch.arange(len(lengths))
    cache.begin_prefill(rows, rows)
    forward.prefill(ids[:, :longest], torch.tensor(lengths) - 1, cache)
    steps = []
    for step in range(num_steps):
        positions = torch.tensor(lengths) + step
        cache.begin_decode(positions, int(positions.min()), int(positions.max()))
        steps.append(forward.decode(ids[rows, positions], positions, cache))
    layers = [(layer.keys, layer.values) for layer in cache.storage]
    kept = [part[row, :, : lengths[row] + num_steps] for row in rows for layer in layers for part in layer]
    return torch.stack(steps), kept


def assert_same(model, lengths, num_steps, atol=1e-5):
    expected, expected_cache = logits_and_cache(FusedForward(model), lengths, num_steps)
    got, cache = logits_and_cache(KernelForward(FusedForward(model)), lengths, num_steps)
    assert_close(got, expected, atol=atol * float(expected.abs().max()), rtol=0)
    for own, other in zip(cache, expected_cache, strict=True):
        assert_close(own, other, atol=atol * float(other.abs().max()), rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_at_any_position_get_the_logits_of_the_fused_forward(family, tiny_model):
    assert_same(tiny_model(family), [1, 15, 16, 17, 40, 63, 64, 65, 100], num_steps=3)


def test_scores_that_lie_far_apart_do_not_overflow(tiny_model):
    model = tiny_model("qwen3")
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.q_norm.weight.mul_(100)  # e**scores is infinite, also relative to that of a later block
    assert_same(model, [70, 100, 125], num_steps=3, atol=1e-4)


def test_bfloat16_is_rounded_to_the_nearest_even(tiny_model):
    forward = KernelForward(FusedForward(tiny_model("llama").bfloat16()))
    # 1.5 * (128 + k) is 192 + 1.5 * k: halfway between whole numbers for odd k, up to 194 for 1 and down to 196 for 3.
    values = torch.tensor([[129.0, 131.0] * 16]).bfloat16() / 256
    norm = RMSNorm([torch.full((32,), 1.5).bfloat16()], eps=1 - float(values.float().square().mean()))
    out = torch.empty_like(values)
    forward._norm(norm, values, out)
    assert_close(out.float() * 256, torch.tensor([[194.0, 196.0] * 16]), atol=0, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_in_bfloat16_they_are_as_close_to_float32(family, tiny_model):
    lengths = [3, 20, 70]
    exact, _ = logits_and_cache(FusedForward(tiny_model(family)), lengths, 2)
    errors = []
    for wrap in (lambda forward: forward, KernelForward):
        got, _ = logits_and_cache(wrap(FusedForward(tiny_model(family).bfloat16())), lengths, 2)
        errors.append(float((got.float() - exact).abs().mean()))
    fused, kernels = errors
    assert 0 < kernels < 1.2 * fused


@pytest.mark.parametrize(
    ("dim", "heads", "kv_heads", "hidden"),
    [
        (8, 4, 2, 36),  # registers of four floats
        (16, 6, 6, 40),  # of eight; a head of its own for each query
        (32, 14, 2, 64),  # seven queries share a head
        (80, 4, 1, 80),
        (128, 8, 1, 64),  # too many to be computed together
    ],
)
def test_any_shape_of_heads(dim, heads, kv_heads, hidden):
    assert_same(shaped_model(dim, heads, kv_heads, hidden), [5, 30, 90], num_steps=2)


def test_a_cache_that_is_fetched_in_advance():
    assert_same(shaped_model(64, 4, 4), [5, 600, 560, 40], num_steps=2)  # 5 MB, more than a second-level cache


def test_threads_give_the_same_bits(tiny_model):
    forward, lengths = KernelForward(FusedForward(tiny_model("qwen3"))), [1, 30, 64, 90] * 8
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one, _ = logits_and_cache(forward, lengths, 2)
        torch.set_num_threads(2)
        two, _ = logits_and_cache(forward, lengths, 2)
    finally:
        torch.set_num_threads(before)
    assert_close(two, one, atol=1e-5 * float(one.abs().max()), rtol=0)  # products may differ; kernels do not


def test_an_engine_draws_the_same_tokens_and_was_compared_with_the_model(tiny_model):
    params = [SamplingParams(max_new_tokens=40, seed=i, ignore_eos=True, n=2) for i in range(3)]
    plain = NativeEngine(tiny_model("qwen3"), **SETTINGS)
    engine = engine_with_kernels(NativeEngine, tiny_model("qwen3"), **SETTINGS)
    assert not engine._runner.uses_fused_forward  # not yet compared
    for got, expected in zip(engine.generate(PROMPTS, params), plain.generate(PROMPTS, params), strict=True):
        assert got.output_token_ids == expected.output_token_ids
        assert_close(torch.tensor(got.logprobs), torch.tensor(expected.logprobs), atol=1e-4, rtol=0)
    assert engine._runner.uses_fused_forward


def test_kernels_that_compute_something_else_are_not_used(tiny_model, caplog):
    engine = engine_with_kernels(NativeEngine, tiny_model("qwen3"), **SETTINGS)
    kernels = engine._runner._fused
    kernels._gated = lambda *arguments: None
    with caplog.at_level(logging.WARNING):
        got = engine.generate(PROMPTS, [SamplingParams(max_new_tokens=5, temperature=0)] * 3)
    assert "differs from the model: not used" in caplog.text
    expected = NativeEngine(tiny_model("qwen3"), **SETTINGS).generate(
        PROMPTS, [SamplingParams(max_new_tokens=5, temperature=0)] * 3
    )
    assert [item.output_token_ids for item in got] == [item.output_token_ids for item in expected]


def test_broken_weights_are_noticed(tiny_model):
    engine = engine_with_kernels(NativeEngine, tiny_model("qwen3"), **SETTINGS)
    engine.generate(PROMPTS, [SamplingParams(max_new_tokens=2)] * 3)
    with torch.no_grad():
        engine.model.model.layers[1].mlp.down_proj.weight[3] = float("nan")
    with pytest.raises(RuntimeError, match="logits are not finite"):
        engine.generate(PROMPTS, [SamplingParams(max_new_tokens=2)] * 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [3, 61, 256, 257, 1000, 5003])
def test_tokens_are_drawn_as_by_the_sampler(vocab, dtype, tiny_model):
    kernels = KernelForward(FusedForward(tiny_model("qwen3").to(dtype)))
    generator = torch.Generator().manual_seed(vocab)
    logits = (4 * torch.randn(300, vocab, generator=generator)).to(dtype)
    logits[:, ::2] = float("-inf")
    uniforms = torch.rand(300, generator=generator, dtype=torch.float64)
    uniforms[:50], uniforms[50:100] = 0.0, 1 - 2.0**-53
    tokens, logprobs = kernels.draw(logits, uniforms, PLAIN)
    expected, expected_logprobs = sample(logits, uniforms, PLAIN)
    is_last = uniforms == uniforms.max()  # where rounding decides among the last small weights
    assert tokens[~is_last].tolist() == expected[~is_last].tolist()
    assert_close(logprobs[~is_last], expected_logprobs[~is_last], atol=2e-5, rtol=0)
    is_behind = torch.arange(vocab) > tokens[:, None]
    assert (logits.float().softmax(-1) * is_behind)[is_last].sum(-1).max() < 1e-5
    assert (tokens % 2 == 1).all()  # none of weight zero


def test_drawn_tokens_have_their_probabilities(tiny_model):
    kernels = KernelForward(FusedForward(tiny_model("qwen3")))
    weights = torch.tensor([0.1, 0.0, 0.4, 0.2, 0.3])
    uniforms = torch.linspace(0, 1, 10_001, dtype=torch.float64)[:-1]
    tokens, logprobs = kernels.draw(weights.log().expand(10_000, -1).contiguous(), uniforms, PLAIN)
    counts = tokens.bincount(minlength=5)
    assert_close(counts / 10_000, weights, atol=1.5e-4, rtol=0)
    assert_close(logprobs, weights.log()[tokens], atol=1e-6, rtol=0)


def test_logits_that_are_not_finite_have_no_logprob(tiny_model):
    kernels = KernelForward(FusedForward(tiny_model("qwen3")))
    for broken in (float("nan"), float("inf")):
        logits = torch.zeros(2, 40)
        logits[1, 7] = broken
        _, logprobs = kernels.draw(logits, torch.tensor([0.5, 0.5]).double(), PLAIN)
        assert logprobs.isnan().tolist() == [False, True]


def test_other_settings_are_left_to_the_sampler(tiny_model):
    kernels = KernelForward(FusedForward(tiny_model("qwen3")))
    logits, uniforms = torch.randn(4, 61), torch.rand(4, dtype=torch.float64)
    asked = np.array([(0.5, 1, 0), (0, 1, 0), (1, 0.9, 0), (1, 1, 3)], SAMPLING)
    plan = plan_sampling(asked, 61, CPU)
    for got, expected in zip(kernels.draw(logits, uniforms, plan), sample(logits, uniforms, plan), strict=True):
        assert_close(got, expected, atol=0, rtol=0)


def test_the_type_of_new_tensors_makes_no_difference(tiny_model):
    kernels = KernelForward(FusedForward(tiny_model("qwen3")))
    logits, uniforms = torch.randn(5, 61), torch.rand(5, dtype=torch.float64)
    expected = kernels.draw(logits, uniforms, PLAIN)
    torch.set_default_dtype(torch.float64)
    try:
        got = kernels.draw(logits, uniforms, PLAIN)
    finally:
        torch.set_default_dtype(torch.float32)
    assert_close(got, expected, atol=0, rtol=0)


def test_close_frees_the_model(tiny_model):
    model = tiny_model("qwen3")
    engine = engine_with_kernels(NativeEngine, model, **SETTINGS)
    engine.generate(PROMPTS, [SamplingParams(max_new_tokens=2)] * 3)
    reference = weakref.ref(model)
    del model
    engine.close()
    gc.collect()
    assert reference() is None


def test_layers_that_grew_before_others_failed_are_read_as_they_are(tiny_model, monkeypatch):
    model = tiny_model("llama")
    expected, _ = logits_and_cache(FusedForward(model), [5, 9], 3)
    cache, resized, calls = RowCache, LayerStorage.resized, []

    def fail_at_the_second(layer, rows, capacity):
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("out of memory")
        return resized(layer, rows, capacity)

    class Failing(cache):
        def begin_decode(self, *args):
            if not calls:
                monkeypatch.setattr(LayerStorage, "resized", fail_at_the_second)
                with pytest.raises(RuntimeError, match="out of memory"):
                    self.reserve(2, 500, 2, 500)
                assert self.layer(0).values.shape != self.layer(1).values.shape
            super().begin_decode(*args)

    monkeypatch.setattr(sys.modules[__name__], "RowCache", Failing)
    got, _ = logits_and_cache(KernelForward(FusedForward(model)), [5, 9], 3)
    assert_close(got, expected, atol=1e-5 * float(expected.abs().max()), rtol=0)


def build(source, **options):
    parts = {"tokenizer": None, "device": CPU, "group": EngineGroup()}
    native = NativeEngineConfig(cpu_kernels=True, **options)
    return build_native_engine(source=source, options=StrategyOptions(native=native), **parts)


def test_they_go_with_weights_of_the_trainer(tiny_model):
    source, params = tiny_model("qwen3"), [SamplingParams(max_new_tokens=8, temperature=0, ignore_eos=True)] * 3
    engine = build(source, share_weights=True)
    assert isinstance(engine, LentEngine)
    expected = NativeEngine(tiny_model("qwen3"), **SETTINGS).generate(PROMPTS, params)
    engine.load_weights([(name, item.detach()) for name, item in source.named_parameters()], 1)
    got = engine.generate(PROMPTS, params)
    assert [item.output_token_ids for item in got] == [item.output_token_ids for item in expected]
    assert engine._runner.uses_fused_forward


def test_large_weights_of_the_trainer_stay_where_the_engine_reads_them():
    large = {"hidden": 64, "vocab_size": 1 << 12}  # a head of 2**18
    source = shaped_model(16, 4, 2, **large)
    params = [SamplingParams(max_new_tokens=8, temperature=0, ignore_eos=True)] * 5
    engine, prompts = build(source, share_weights=True), [*PROMPTS, [11], [12, 13]]
    for version in (1, 2):
        engine.load_weights([(name, item.detach()) for name, item in source.named_parameters()], version)
        alone = shaped_model(16, 4, 2, **large)
        alone.load_state_dict(source.state_dict())
        expected = NativeEngine(alone, **SETTINGS).generate(prompts, params)
        got = engine.generate(prompts, params)
        assert [item.output_token_ids for item in got] == [item.output_token_ids for item in expected]
        with torch.no_grad():
            source.model.layers[0].mlp.up_proj.weight.mul_(-1)
    assert engine._runner.uses_fused_forward


@pytest.mark.parametrize("rows", [0, MixedRows(np.array([NO_ADAPTER, 0]), CPU)])
def test_they_go_with_adapters(rows, tiny_model):
    def logits(wrap):
        model, chosen = tiny_model("qwen3"), ChosenAdapters()
        generator = torch.Generator().manual_seed(3)
        for layer in model.modules():
            if isinstance(layer, nn.Linear):
                shapes = ((2, layer.in_features), (layer.out_features, 2))
                layer.adapter_factors = {0: Factors(*(torch.randn(shape, generator=generator) for shape in shapes))}
        adapted = AdaptedForward(model, chosen)
        adapted.refresh()
        forward, chosen.rows = wrap(adapted), 0  # of the prompts

        class Switching:
            prefill = forward.prefill

            def decode(self, *arguments):
                chosen.rows = rows
                return forward.decode(*arguments)

        return logits_and_cache(Switching(), [3, 20], 2)[0]

    base, _ = logits_and_cache(FusedForward(tiny_model("qwen3")), [3, 20], 2)
    expected = logits(lambda forward: forward)
    assert_close(logits(KernelForward), expected, atol=1e-5 * float(expected.abs().max()), rtol=0)
    assert not torch.allclose(base, expected)


@pytest.mark.parametrize("family", ["gpt2", "qwen3_moe"])
def test_other_families_are_refused(family, tiny_model):
    with pytest.raises(ValueError, match="--native.cpu_kernels True does not support .*: only Llama, Mistral"):
        build(tiny_model(family))


def test_sizes_and_types_that_do_not_fit_are_refused(tiny_model):
    with pytest.raises(ValueError, match="multiple of 4. This model has 8, 34 and 48"):
        KernelForward(FusedForward(shaped_model(8, 4, 2, hidden=34)))
    with pytest.raises(ValueError, match="float32 or bfloat16 on a CPU: the engine's weights are torch.float64 on cpu"):
        KernelForward(FusedForward(tiny_model("qwen3").double()))


def test_queries_that_fit_into_registers_are_computed_together():
    assert _queries_together(2, 2, True) == 2
    assert _queries_together(7, 4, True) == 7
    assert _queries_together(8, 8, True) == 2  # three would fit, but do not divide eight
    assert _queries_together(8, 16, False) == 1
