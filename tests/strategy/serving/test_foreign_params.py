"""Sampling parameters of other trainers: every call without a seed draws anew, on every rank, also after a resume."""

import json
import sys
from pathlib import Path

import pytest

from lightrl.engines.base import SamplingParams
from lightrl.seeding import mix_seed
from lightrl.strategy.serving.foreign_params import gathered_seeds, local_seeds, params_for_each
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
