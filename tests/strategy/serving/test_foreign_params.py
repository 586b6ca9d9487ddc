"""Sampling parameters of other trainers: every call without a seed draws anew, on every rank, also after a resume."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightrl.engines.base import SamplingParams
from lightrl.imports import is_installed
from lightrl.seeding import mix_seed
from lightrl.strategy.serving.foreign_params import as_params, gathered_seeds, local_seeds, params_for_each
from lightrl.testing import run_program, run_spmd

PROGRAM = Path(__file__).parents[2] / "programs" / "unseeded_program.py"


def distinct(samples: list[list[int]]) -> int:
    return len({tuple(sample) for sample in samples})


def test_calls_without_a_seed_draw_anew_and_go_on_after_a_resume(tmp_path: Path) -> None:
    outputs = [tmp_path / "one.json", tmp_path / "two.json"]
    run_program([sys.executable, str(PROGRAM), str(outputs[0]), "single", str(tmp_path / "1")], timeout_s=120)
    run_spmd(PROGRAM, str(outputs[1]), "fsdp", str(tmp_path / "2"), world_size=2, timeout_s=120)
    alone, two = [json.loads(path.read_text()) for path in outputs]
    for report, world in ((alone, 1), (two, 2)):
        drawn = [sample for call in report["gathered"] for sample in call]
        assert distinct(drawn) == len(drawn) == 12
        own = [sample for call in report["local"] for sample in call]
        assert distinct(own) == len(own) == 8 * world  # 4 calls of 2 prompts on each rank
        assert distinct(drawn + own) == 12 + 8 * world
        assert report["seeded"][0] == report["seeded"][1]
        assert report["again"] == report["gathered"][:1]  # a run of the same seed repeats, and goes on where it was
        assert report["resumed"] == report["next"]
    assert two["gathered"] == alone["gathered"]  # however the prompts are spread
    assert two["seeded"] == alone["seeded"]


def no_seed(index: int) -> int:
    raise AssertionError("a seed was given")


def test_shared_params_get_a_seed_from_the_global_place() -> None:
    shared = SamplingParams(seed=5)
    assert [p.seed for p in params_for_each(shared, 2, 3, no_seed)] == [mix_seed(5, 3), mix_seed(5, 4)]
    own = [SamplingParams(seed=1), SamplingParams(seed=2)]
    assert params_for_each(own, 2, 3, no_seed) == own
    assert params_for_each({"max_tokens": 3, "top_k": 2}, 1, 0, int)[0].max_new_tokens == 3
    with pytest.raises(ValueError, match="2 sampling parameters for 3 prompts"):
        params_for_each(own, 3, 0, no_seed)
    with pytest.raises(ValueError, match="beam_width"):
        params_for_each({"beam_width": 3}, 1, 0, int)
    with pytest.raises(TypeError, match="not int"):
        params_for_each(3, 1, 0, no_seed)


def test_parameters_without_a_seed_get_one_of_call_position_and_engine() -> None:
    for given in ({"max_tokens": 2}, {"seed": None}, [{"max_tokens": 2}] * 2):
        assert [p.seed for p in params_for_each(given, 2, 0, lambda index: 10 + index)] == [10, 11]
    mixed = params_for_each([SamplingParams(seed=4), SamplingParams()], 2, 0, lambda index: 10 + index)
    assert [p.seed for p in mixed] == [4, 11]
    # (run seed, call, first position or engine, index): each changes the seed, and the two kinds of call never meet
    makers = [gathered_seeds(1, 0, 0), gathered_seeds(2, 0, 0), gathered_seeds(1, 1, 0), local_seeds(1, 0, 0)]
    makers += [local_seeds(1, 0, 1), local_seeds(1, 1, 0), local_seeds(2, 0, 0)]
    assert len({make(index) for make in makers for index in range(3)}) == 21
    assert gathered_seeds(1, 0, 2)(1) == gathered_seeds(1, 0, 3)(0)


class Theirs:
    """As the sampling parameters of another engine are: every setting has a value."""

    __struct_fields__ = ("max_tokens", "top_k", "stop", "min_p", "logit_bias", "_cache")

    def __init__(self, **given: Any) -> None:
        values = {"max_tokens": 16, "top_k": -1, "stop": None, "min_p": 0.0, "logit_bias": None, "_cache": object()}
        vars(self).update(values | given)


def test_parameters_in_the_words_of_others() -> None:
    found = as_params({"max_tokens": 3, "top_k": -1, "stop": "x", "stop_token_ids": [4], "min_tokens": 1, "seed": None})
    assert found == SamplingParams(max_new_tokens=3, stop=("x",), stop_token_ids=(4,), min_new_tokens=1)
    neutral = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "min_p": 0.0, "best_of": 1, "logit_bias": None}
    assert as_params({**neutral, "skip_special_tokens": False, "bad_words": []}) == SamplingParams()
    assert as_params({"n_samples": 2, "greedy": True, "top_k": 10**8}) == SamplingParams(n=2, temperature=0.0)
    assert as_params({"do_sample": False, "temperature": 0.7}) == SamplingParams(temperature=0.0)
    assert as_params({"do_sample": True, "temperature": 0.7}) == SamplingParams(temperature=0.7)
    assert as_params(Theirs(stop=["a", "b"], max_tokens=5)) == SamplingParams(max_new_tokens=5, stop=("a", "b"))
    assert as_params(Theirs()) == SamplingParams(max_new_tokens=16)
    for given, text in (
        (Theirs(min_p=0.1), "min_p=0.1"),
        ({"logit_bias": {1: 2}}, "logit_bias="),
        ({"max_tokens": None}, "max_tokens is None"),
        (Theirs(top_k=-2), "top_k is -2"),
    ):
        with pytest.raises(ValueError, match=text):
            as_params(given)


def test_values_of_another_type_are_refused() -> None:
    for given, text in (
        ({"top_k": 2.5}, "top_k is 2.5: it must be a whole number"),
        ({"max_tokens": "4"}, "max_tokens is '4': it must be a whole number"),
        ({"n": True}, "n is True: it must be a whole number"),
        ({"seed": "1"}, "seed is '1': it must be a whole number"),
        ({"temperature": "1"}, "temperature is '1': it must be a number"),
        ({"top_p": [0.9]}, r"top_p is \[0.9\]: it must be a number"),
        ({"ignore_eos": 1}, "ignore_eos is 1: it must be True or False"),
        ({"stop": ["a", 3]}, r"stop is \['a', 3\]: it must be a text or a list of texts"),
        ({"stop_token_ids": 5}, "stop_token_ids is 5: it must be a list of whole numbers"),
        ({"stop_token_ids": "5"}, "stop_token_ids is '5': it must be a list of whole numbers"),
        (Theirs(max_tokens=2.0), "max_tokens is 2.0: it must be a whole number"),
        (SamplingParams(top_k=2.5), "top_k is 2.5: it must be a whole number"),  # type: ignore[arg-type]
    ):
        with pytest.raises(TypeError, match=text):
            as_params(given)
    numbers = {"max_tokens": np.int64(3), "temperature": np.float32(0.5), "top_p": 1, "stop_token_ids": {7}}
    assert as_params(numbers) == SamplingParams(max_new_tokens=3, temperature=0.5, stop_token_ids=(7,))


@pytest.mark.engine
@pytest.mark.skipif(not is_installed("vllm"), reason="vLLM is not installed")
def test_vllms_own_object() -> None:
    from vllm import SamplingParams as OfVLLM

    theirs = OfVLLM(temperature=0.5, top_p=0.9, top_k=-1, max_tokens=7, min_tokens=2, stop=["a"], n=3, seed=4)
    assert as_params(theirs) == SamplingParams(
        temperature=0.5, top_p=0.9, max_new_tokens=7, min_new_tokens=2, stop=("a",), n=3, seed=4
    )
    assert as_params(OfVLLM(max_tokens=2, presence_penalty=0.5)).presence_penalty == 0.5
    with pytest.raises(ValueError, match="min_p=0.1"):
        as_params(OfVLLM(min_p=0.1))
