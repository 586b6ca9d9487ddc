"""What SGLang is asked and what its answers mean, without SGLang."""

import asyncio
from types import SimpleNamespace

import pytest
import torch

from lightrl.engines.base import EnginePrompt, SamplingParams
from lightrl.engines.sglang.requests import Sample, SampleTasks, media_features
from lightrl.seeding import mix_seed


def tasks(is_deterministic=False):
    return SampleTasks(
        None, eos_ids=(2, 3), vocab_size=50, is_deterministic=is_deterministic, asked_for=lambda params: {}
    )


def sample(index=0, request_id=0, **given):
    params = SamplingParams(**{"max_new_tokens": 4, **given})
    return Sample(request_id, index, (5, 6), params)


def answer(tokens, kind="length", versions=None, **more):
    meta = {
        "finish_reason": {"type": kind},
        "output_token_logprobs": [(-0.5 - place, token, None) for place, token in enumerate(tokens)],
        **({} if versions is None else {"weight_versions": versions}),
        **more,
    }
    return {"output_ids": tokens, "meta_info": meta}


def test_features_of_images_and_videos_in_any_order():
    """Two placeholders of images around one of a video: each kind by itself, in its own order."""
    tiny_vlm = pytest.importorskip("tiny_vlm", exc_type=ImportError)
    media = tiny_vlm.tiny_media("qwen2_5_vl")
    start, end, image, video = media.processor.tokenizer.convert_tokens_to_ids(tiny_vlm.VISION_TOKENS)
    images, films = (tiny_vlm.checkered(56, 28, 1), tiny_vlm.checkered(28, 56, 2)), (tiny_vlm.frames(4, 28, 28),)
    ids = (start, image, end, start, video, end, start, image, end)
    found = media_features(media, EnginePrompt(token_ids=ids, images=images, videos=films))
    theirs = media.processor.image_processor(list(images), return_tensors="pt")
    film = media.processor.video_processor(list(films), do_sample_frames=False, return_tensors="pt")
    assert torch.equal(found["pixel_values"], theirs["pixel_values"])
    assert torch.equal(found["image_grid_thw"], theirs["image_grid_thw"])
    assert torch.equal(found["pixel_values_videos"], film["pixel_values_videos"])
    assert torch.equal(found["video_grid_thw"], film["video_grid_thw"])
    assert found["second_per_grid_ts"].tolist() == [1.0]  # two frames become one, at two a second
    assert media_features(media, EnginePrompt(token_ids=(5,))) is None


def test_no_request_id_begins_with_another():
    ids = [sample(index, request).rid for request in (1, 10, 100) for index in (1, 10)]
    assert not [(a, b) for a in ids for b in ids if a != b and b.startswith(a)]


@pytest.mark.parametrize(
    ("given", "tokens", "said", "kept", "reason"),
    [
        ({}, [7, 8, 9, 10], "length", 4, "length"),
        ({}, [7, 3], "stop", 2, "stop"),
        ({"stop_token_ids": (8,)}, [7, 8], "stop", 2, "stop"),
        ({"ignore_eos": True}, [7, 3, 2, 9], "length", 4, "length"),
        ({"ignore_eos": True, "stop_token_ids": (8,)}, [7, 3, 8, 9], "length", 3, "stop"),
        ({}, [7], "abort", 1, "abort"),
        ({}, [], "abort", 0, "abort"),
        ({}, [7, 3], "abort", 2, "stop"),  # the last step before it stopped brought the end
        ({}, [7, 8, 9, 10], "abort", 4, "length"),
    ],
)
def test_why_a_sample_ended(given, tokens, said, kept, reason):
    found = tasks()._completion(sample(**given), answer(tokens, said))
    assert (found.output_token_ids, found.finish_reason) == (tuple(tokens[:kept]), reason)
    assert found.logprobs == tuple(-0.5 - place for place in range(kept))


def test_a_sample_that_is_cut_short_is_an_error():
    with pytest.raises(RuntimeError, match="after 1 of 4 tokens"):
        tasks()._completion(sample(), answer([7], "length"))


def test_an_abort_in_the_queue_has_no_logprobs():
    found = tasks()._completion(
        sample(), {"output_ids": [], "meta_info": {"finish_reason": {"type": "abort", "message": "in waiting queue"}}}
    )
    assert (found.output_token_ids, found.versions, found.finish_reason) == ((), (), "abort")


def test_an_abort_gives_a_sample_that_sglang_gave_up():
    """Whoever waits for the sample would otherwise wait forever."""
    loop = asyncio.new_event_loop()
    manager = SimpleNamespace(rid_to_state={})
    engine = tasks()
    engine._process = SimpleNamespace(manager=manager, run=loop.run_until_complete)

    async def give_up(sample):
        if sample.index:
            raise ValueError("no memory for this one")
        return answer([7, 8, 9, 10])

    engine._generate = give_up
    engine.add([sample(0), sample(1)])
    loop.run_until_complete(engine._start_waiting())
    found = engine.abort({0})
    loop.close()
    assert [(item.sample_index, len(item.output_token_ids), item.finish_reason) for item in found] == [
        (0, 4, "length"),
        (1, 0, "abort"),
    ]


def test_versions_are_those_of_the_spans():
    engine = tasks()
    engine.version = 9
    spans = [{"version": "4", "start": 0, "end": 1}, {"version": "9", "start": 1, "end": 4}]
    assert engine._completion(sample(), answer([7, 8, 9, 10], versions=spans)).versions == (4, 9, 9, 9)
    spans[1]["end"] = 6  # the last of its tokens were cut off
    assert engine._completion(sample(), answer([7, 8, 9, 10], versions=spans)).versions == (4, 9, 9, 9)
    assert engine._completion(sample(), answer([7, 8, 9, 10])).versions == (9,) * 4


def test_logprobs_of_a_cut_distribution_are_taken_from_where_they_are():
    found = tasks()._completion(
        sample(top_k=3), answer([7, 8, 9, 10], output_token_sampling_logprobs=[-0.1, -0.2, -0.3, -0.4])
    )
    assert found.logprobs == (-0.1, -0.2, -0.3, -0.4)


def test_logits_that_are_not_finite_are_an_error():
    bad = answer([7, 8, 9, 10])
    bad["meta_info"]["output_token_logprobs"][2] = (float("nan"), 9, None)
    with pytest.raises(RuntimeError, match="not finite"):
        tasks()._completion(sample(), bad)


def test_what_is_asked():
    plain = tasks()._sampling(sample(temperature=0.7, stop_token_ids=(9,)))
    assert plain == {
        "max_new_tokens": 4,
        "temperature": 0.7,
        "top_p": 1.0,
        "top_k": -1,
        "ignore_eos": False,
        "stop_token_ids": [2, 3, 9],
    }
    assert tasks()._sampling(sample(top_p=0.9))["top_k"] == 50  # it tells no logprobs of an unbounded number
    assert "stop_token_ids" not in tasks()._sampling(sample(ignore_eos=True))


def test_seeds_count_where_the_engine_is_deterministic():
    engine = tasks(is_deterministic=True)
    seeds = [engine._sampling(sample(index, seed=7))["sampling_seed"] for index in (0, 1)]
    assert seeds == [mix_seed(7, 0) % 2**31, mix_seed(7, 1) % 2**31]
    assert engine._sampling(sample(1, seed=7, first_token=3))["sampling_seed"] == seeds[1]  # positions go on counting
