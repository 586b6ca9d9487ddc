"""Other kinds of models: untied, a mixture of experts, and one that sees."""

import pytest
import torch
from sabotaged_loader import FAULT_FILE
from sglang_testing import largest_difference, pairs, perturb, started, tiny
from transformers import AutoModelForImageTextToText

from lightrl.engines.base import EnginePrompt, SamplingParams, WeightSyncError
from lightrl.engines.colocated import ColocatedEngine
from lightrl.models.multimodal import MediaProcessor
from lightrl.models.policy import Policy, response_batch

pytest.importorskip("PIL")
import tiny_vlm
from tiny_vlm import FAMILIES, VISION_TOKENS, checkered, frames

PROMPTS = [[5, 6, 7], [8, 9]]


@pytest.mark.parametrize("kind", ["untied", "moe"])
def test_logprobs_before_and_after_a_sync(kind):
    model = tiny(kind)
    params = SamplingParams(max_new_tokens=24, ignore_eos=True, temperature=0.7, n=3)
    with started(model) as raw:
        engine = ColocatedEngine(raw)
        for version in (1, 2):
            engine.update_weights(pairs(model), version)
            assert largest_difference(model, engine.generate(PROMPTS, [params] * 2), 0.7) < 1e-5
            perturb(model, seed=version)
        wrong = [(name, tensor) for name, tensor in pairs(model) if not name.endswith("layers.1.mlp.down_proj.weight")]
        wrong = [pair for pair in wrong if pair[0] != "model.layers.1.mlp.experts.down_proj"]
        with pytest.raises(WeightSyncError, match="missing model.layers.1.mlp"):
            engine.update_weights(wrong, 3)


@pytest.fixture(scope="module", params=FAMILIES)
def vlm(request, tmp_path_factory):
    """A folder's model as it is trained, and the trainer's own way to the ids and positions of a prompt."""
    folder = tmp_path_factory.mktemp(request.param)
    with pytest.MonkeyPatch.context() as patch:  # on a CPU SGLang rounds up sizes that are no multiple of 64
        patch.setitem(tiny_vlm._VISION, "intermediate_size", 64)
        tiny_vlm.save_tiny_vlm(folder, request.param)
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    return Policy(model), MediaProcessor.load(str(folder))


@pytest.fixture(scope="module")
def seeing(vlm):
    with started(vlm[0].hf) as engine:
        yield engine


def prompt_with(media, images=(), videos=()):
    start, end, image, video = media.processor.tokenizer.convert_tokens_to_ids(VISION_TOKENS)
    ids = [40, 41]
    for placeholder in [image] * len(images) + [video] * len(videos):
        ids += [start, placeholder, end, 50]
    return EnginePrompt(token_ids=tuple(ids), images=tuple(images), videos=tuple(videos))


def difference(vlm, items, prompt):
    """From the logprobs that the trainer gives the same tokens."""
    policy, media = vlm
    encoded = media.encode(prompt.token_ids, prompt.images, prompt.videos)
    assert {item.prompt_token_ids for item in items} == {encoded.token_ids}
    pairs_of_ids = [(item.prompt_token_ids, item.output_token_ids) for item in items]
    with torch.no_grad():
        scores = policy.eval()(response_batch(pairs_of_ids, encoded=[encoded] * len(items))).logprobs
    return float((scores - torch.tensor([value for item in items for value in item.logprobs])).abs().max())


def test_images_and_videos_before_and_after_a_sync(seeing, vlm):
    policy, media = vlm
    engine = ColocatedEngine(seeing)
    params = SamplingParams(max_new_tokens=16, ignore_eos=True, n=2)
    prompts = {
        "one image": prompt_with(media, [checkered(84, 56)]),
        "two images": prompt_with(media, [checkered(56, 56, 1), checkered(112, 56, 2)]),
        "a video": prompt_with(media, videos=[frames(2, 64, 64)]),  # one step in time: see docs/engines_sglang.md
        "text": EnginePrompt(token_ids=(40, 41, 42)),
    }
    for version in (1, 2, 3):
        engine.update_weights(pairs(policy.hf), version)
        for prompt in prompts.values():
            items = engine.generate([prompt], [params])
            assert len(items[0].prompt_token_ids) == seeing.num_prompt_tokens(prompt)
            assert difference(vlm, items, prompt) < 1e-5
        perturb(policy.hf, seed=version, scale=0.02)  # the vision tower's weights, too: no image may be remembered


def test_an_image_prompt_goes_on_after_a_sync(seeing, vlm):
    policy, media = vlm
    engine = ColocatedEngine(seeing)
    engine.update_weights(pairs(policy.hf), 1)
    prompt = prompt_with(media, [checkered(84, 56, 3)])
    engine.submit(prompt, SamplingParams(max_new_tokens=300, ignore_eos=True))
    engine.step()
    engine.update_weights(pairs(policy.hf), 2)
    done = []
    while engine.has_unfinished():
        done += engine.step()
    assert set(done[0].versions) <= {1, 2}
    assert difference(vlm, done, prompt) < 1e-5


def test_placeholders_without_images_are_refused(seeing):
    with pytest.raises(ValueError, match="placeholder"):
        seeing.submit(EnginePrompt(token_ids=(40, seeing.image_token_id)), SamplingParams())


def test_vision_weights_are_read_back_too(seeing, vlm):
    perturb(vlm[0].hf, seed=11, scale=0.02)
    (seeing._reports / FAULT_FILE).write_text("skip_vision")
    with pytest.raises(WeightSyncError, match="visual.blocks.0.attn.qkv.weight is not held") as caught:
        seeing.load_weights(pairs(vlm[0].hf), 9)
    assert "mlp" not in str(caught.value)
    (seeing._reports / FAULT_FILE).unlink()
    seeing.load_weights(pairs(vlm[0].hf), 10)
