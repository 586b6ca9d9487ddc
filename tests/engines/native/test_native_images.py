"""The native engine with images and videos, against transformers' own forward over each whole sequence."""

import pytest
import torch
from made_samples import made_sample
from tiny_vlm import FAMILIES, IMAGE, checkered, save_tiny_vlm, tiny_media, tiny_model
from tiny_vlm_training import TEXTS, Encoder, own_logprobs, shown
from torch.testing import assert_close

from lightrl.config import StrategyOptions
from lightrl.engines.base import EngineGroup, EnginePrompt, SamplingParams
from lightrl.engines.colocated import ColocatedEngine
from lightrl.engines.native.engine import NativeEngine, build_native_engine
from lightrl.models.policy import load_policy
from lightrl.records import Experience, Prompt

CPU = torch.device("cpu")


def make_engine(family, seed=0, **options):
    engine = NativeEngine(tiny_model(family, seed), eos_token_ids=(1,), device=CPU, media=tiny_media(family), **options)
    colocated = ColocatedEngine(engine)
    colocated.version = 0  # it has its weights
    return colocated


def engine_prompt(encoder, index):
    images, videos = shown(index)
    return EnginePrompt(token_ids=encoder.tokenize(TEXTS[index][0]), images=tuple(images), videos=tuple(videos))


def expected_logprobs(model, encoder, index, item, temperature):
    sample = made_sample(
        prompt=Prompt(index=index, text="", token_ids=engine_prompt(encoder, index).token_ids),
        response_ids=item.output_token_ids,
        sampler_logprobs=item.logprobs,
        versions=item.versions,
        prompt_ids=item.prompt_token_ids,
    )
    with torch.no_grad():
        return own_logprobs(model, encoder, Experience(sample=sample, reward=0.0, advantage=0.0), temperature)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("max_num_seqs", [3, 64])
def test_logprobs_equal_the_whole_model_over_the_whole_sequence(family, max_num_seqs):
    encoder, engine = Encoder(family), make_engine(family, max_num_seqs=max_num_seqs)
    asked = [0, 1, 2, 3, 1, 0]  # images, text, two images, a video, and some again
    params = [
        SamplingParams(max_new_tokens=4 + 5 * place, temperature=0.7 + 0.1 * place, n=1 + place % 3, seed=place)
        for place in range(len(asked))
    ]
    prompts = [engine_prompt(encoder, index) for index in asked]
    done = engine.generate(prompts, params)
    assert len(done) == 12
    for item in done:
        index, param = asked[item.request_id], params[item.request_id]
        expected = expected_logprobs(tiny_model(family), encoder, index, item, param.temperature)
        assert_close(torch.tensor(item.logprobs), expected, atol=1e-5, rtol=0)
        prompt = prompts[item.request_id]
        assert item.prompt_token_ids == encoder.media.encode(prompt.token_ids, prompt.images, prompt.videos).token_ids
    assert sum(len(item.output_token_ids) for item in done) > 60
    # The samples of a prompt share its prefill, also those that found no free row beside their siblings.
    wanted = sum(engine.engine.num_prompt_tokens(prompt) for prompt in prompts)
    assert engine.engine.num_prefill_tokens == wanted
    assert wanted > sum(len(prompt.token_ids) for prompt in prompts)


def test_an_aborted_sample_goes_on_with_its_image():
    encoder = Encoder("qwen2_5_vl")
    prompt, params = engine_prompt(encoder, 0), SamplingParams(max_new_tokens=20, seed=4, ignore_eos=True)
    (whole,) = make_engine("qwen2_5_vl").generate([prompt], [params])
    engine = make_engine("qwen2_5_vl")
    engine.submit(prompt, params)
    for _ in range(6):
        engine.step()
    (partial,) = engine.abort()
    assert 0 < len(partial.output_token_ids) < len(whole.output_token_ids)
    engine.submit(prompt, params, partial)
    while engine.has_unfinished():
        done = engine.step()
    assert done[0].output_token_ids == whole.output_token_ids
    assert done[0].prompt_token_ids == whole.prompt_token_ids
    assert_close(torch.tensor(done[0].logprobs), torch.tensor(whole.logprobs), atol=1e-5, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_an_engine_built_for_a_policy_sees_its_new_weights_and_images(family, tmp_path):
    save_tiny_vlm(tmp_path, family)
    policy = load_policy(str(tmp_path), materialize=True)
    engine = build_native_engine(
        source=policy.hf, tokenizer=None, options=StrategyOptions(), device=CPU, group=EngineGroup()
    )
    colocated, encoder = ColocatedEngine(engine), Encoder(family)
    params = SamplingParams(max_new_tokens=5, seed=1, ignore_eos=True)
    found = []
    for seed in (0, 7):
        model = tiny_model(family, seed)
        colocated.update_weights(sorted(model.named_parameters()), seed)
        colocated.wake()
        (item,) = colocated.generate([engine_prompt(encoder, 2)], [params])
        assert_close(torch.tensor(item.logprobs), expected_logprobs(model, encoder, 2, item, 1.0), atol=1e-5, rtol=0)
        found.append(item.output_token_ids)
        colocated.sleep(2)
    assert found[0] != found[1]


def test_images_that_a_model_does_not_take_are_refused(tiny_model):
    engine = ColocatedEngine(NativeEngine(tiny_model("llama"), eos_token_ids=(2,), device=CPU))
    engine.version = 0  # it has its weights
    with pytest.raises(ValueError, match="comes with images, which this engine's model does not take"):
        engine.submit(EnginePrompt(token_ids=(5,), images=(checkered(28, 28),)), SamplingParams())


def test_the_context_holds_expanded_prompts():
    engine, encoder = make_engine("qwen2_5_vl", max_model_len=20), Encoder("qwen2_5_vl")
    prompt = EnginePrompt(token_ids=encoder.tokenize(IMAGE), images=(checkered(84, 84),))  # 2 + 9 tokens
    assert engine.engine.num_prompt_tokens(prompt) == 11
    engine.generate([prompt], [SamplingParams(max_new_tokens=9)])
    with pytest.raises(ValueError, match="prompt 0 has 11 tokens; with max_new_tokens 10"):
        engine.generate([prompt], [SamplingParams(max_new_tokens=10)])
