"""Collector on a real strategy and engine in one process: sampling, scoring, evaluation."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_vlm import IMAGE, checkered, save_tiny_vlm, tiny_media

from lightrl.builtin.model import tiny_model
from lightrl.comm import Comm
from lightrl.config import EvalConfig, GRPOConfig
from lightrl.engines.base import SamplingParams
from lightrl.metrics import Statistics
from lightrl.models.policy import Policy, load_policy, load_tokenizer
from lightrl.records import Prompt, Sample
from lightrl.rewards import NoVerdictError, has_reward
from lightrl.rewards.reward_set import FailurePolicy, RewardSet, WeightedReward
from lightrl.rollout.collector import Collector, sampling_of
from lightrl.strategy import EngineStatus, StrategyBase, create_strategy


def length_reward(sample: Sample) -> float:
    return float(len(sample.response_ids))


@pytest.fixture(scope="module")
def strategy() -> StrategyBase:
    strategy = create_strategy(GRPOConfig(strategy="single"))
    strategy.setup_distributed()
    model, tokenizer = tiny_model()
    policy = strategy.prepare(Policy(model))
    strategy.tokenizer = tokenizer
    strategy.setup_inference_engine(None, "native", actor=policy)
    return strategy


@pytest.fixture(scope="module")
def prompts() -> list[tuple[int, Prompt]]:
    _, tokenizer = tiny_model()
    texts = ["1+2=", "33+44=", "5+5="]
    return [
        (place, Prompt(index=10 + place, text=text, token_ids=tuple(tokenizer(text)["input_ids"]), answer="0"))
        for place, text in enumerate(texts)
    ]


def collector(strategy: StrategyBase, seed: int = 0) -> Collector:
    return Collector(strategy, length_reward, seed=seed, max_new_tokens=6)


def sample(strategy: StrategyBase, prompts: list[tuple[int, Prompt]], **changes: int) -> list[Sample]:
    settings = {"step": 1, "group_size": 2, **changes}
    seed = settings.pop("seed", 0)
    return collector(strategy, seed).sample(prompts, temperature=1.0, **settings)  # type: ignore[arg-type]


def test_groups_are_adjacent_and_complete(strategy: StrategyBase, prompts: list[tuple[int, Prompt]]) -> None:
    samples = sample(strategy, prompts)
    assert [(s.position, s.sample_index, s.prompt.index) for s in samples] == [
        (0, 0, 10), (0, 1, 10), (1, 0, 11), (1, 1, 11), (2, 0, 12), (2, 1, 12)
    ]  # fmt: skip
    for item in samples:
        assert len(item.response_ids) == len(item.sampler_logprobs) == len(item.versions) <= 6
    assert strategy.engine is not None
    assert strategy.engine.status is EngineStatus.SLEEPED


def test_draws_hang_on_seed_step_and_position_alone(strategy: StrategyBase, prompts: list[tuple[int, Prompt]]) -> None:
    first = [s.response_ids for s in sample(strategy, prompts)]
    # As another rank would see them: one prompt less, in the same positions.
    assert [s.response_ids for s in sample(strategy, prompts[1:])] == first[2:]
    assert [s.response_ids for s in sample(strategy, prompts, step=2)] != first
    assert [s.response_ids for s in sample(strategy, prompts, seed=1)] != first


def test_rewards_of_samples_and_of_greedy_responses(strategy: StrategyBase, prompts: list[tuple[int, Prompt]]) -> None:
    mine = collector(strategy)
    samples = sample(strategy, prompts)
    assert mine.score(samples) == [float(len(s.response_ids)) for s in samples]
    greedy = mine.score(mine.sample_greedily(prompts))
    assert len(greedy) == len(prompts)
    assert greedy == mine.score(mine.sample_greedily(prompts))
    assert mine.score(mine.sample_greedily([])) == []


def test_a_baseline_that_fails_is_counted(strategy: StrategyBase, prompts: list[tuple[int, Prompt]]) -> None:
    def failing(sample: Sample) -> float:
        raise OSError("no")

    rewards = RewardSet(
        [WeightedReward(label="mine", weight=1.0, reward=failing)], policy=FailurePolicy(max_failures=9)
    )
    statistics = Statistics()
    collector = Collector(strategy, rewards, seed=0, max_new_tokens=6)
    found = collector.score(collector.sample_greedily(prompts), statistics, prefix="greedy/")
    assert len(found) == 3
    assert not any(map(has_reward, found))
    assert statistics.reduce(strategy.comm)["greedy/reward/failures"] == 3


def test_an_evaluation_only_reads(strategy: StrategyBase, prompts: list[tuple[int, Prompt]]) -> None:
    mine, held_out = collector(strategy), [prompt for _, prompt in prompts]
    torch.manual_seed(3)
    before = torch.get_rng_state()
    first = mine.evaluate(held_out, temperature=1.0)
    assert first == mine.evaluate(held_out, temperature=1.0)  # the same draws at every step
    assert torch.equal(before, torch.get_rng_state())
    assert first["eval/reward"] == first["eval/response_tokens"]
    assert first["eval/accuracy"] == 1.0  # every response has at least one token


def test_an_evaluation_counts_the_responses_that_were_cut_off(
    strategy: StrategyBase, prompts: list[tuple[int, Prompt]]
) -> None:
    kept: list[Sample] = []
    found = collector(strategy).evaluate(
        [prompt for _, prompt in prompts] * 8, temperature=1.0, keep=lambda samples, _: kept.extend(samples)
    )
    cut = [sample.finish_reason == "length" for sample in kept]
    assert 0 < sum(cut) < len(cut) == 24
    assert found["eval/truncated"] == sum(cut) / 24


def test_an_evaluation_shows_its_samples_with_their_rewards(
    strategy: StrategyBase, prompts: list[tuple[int, Prompt]]
) -> None:
    kept: list[tuple[Sample, float]] = []
    found = collector(strategy).evaluate(
        [prompt for _, prompt in prompts],
        temperature=1.0,
        n=2,
        keep=lambda samples, rewards: kept.extend(zip(samples, rewards, strict=True)),
    )
    assert [sample.position for sample, _ in kept] == [0, 0, 1, 1, 2, 2]
    assert [reward for _, reward in kept] == [length_reward(sample) for sample, _ in kept]
    assert found["eval/reward"] == pytest.approx(sum(reward for _, reward in kept) / 6)


def test_an_evaluation_without_rewards_tells_no_accuracy(
    strategy: StrategyBase, prompts: list[tuple[int, Prompt]]
) -> None:
    def unsure(sample: Sample) -> float:
        raise NoVerdictError("cannot tell")

    scoring = Collector(strategy, unsure, seed=0, max_new_tokens=6)
    found = scoring.evaluate([prompt for _, prompt in prompts], temperature=1.0)
    assert found["eval/reward/no_verdict"] == 3
    assert not {"eval/reward", "eval/accuracy", "eval/reward/unsure"} & set(found)


class OfLengths(Collector):
    """Responses of given lengths, by position, in place of those of an engine; the longest is cut off."""

    lengths = (2, 7, 3)

    def _generate(self, prompts: Any, seeds: list[int], n: int, sampling: SamplingParams) -> list[Sample]:
        return [
            Sample(
                prompt=prompt,
                position=position,
                sample_index=0,
                response_ids=(5,) * self.lengths[position],
                sampler_logprobs=(-1.0,) * self.lengths[position],
                versions=(0,) * self.lengths[position],
                finish_reason="length" if self.lengths[position] == 7 else "stop",
                text="",
            )
            for position, prompt in prompts
        ]


def test_an_evaluation_is_a_mean_over_the_samples_of_ranks_with_unequal_numbers(
    prompts: list[tuple[int, Prompt]],
) -> None:
    """Rank 0 of two has the first and the third prompt; the ranks come one after the other."""
    gathered: list[Any] = []
    for rank in range(2):
        alone: Any = SimpleNamespace(comm=Comm(), tokenizer=None, media=None)
        mine = OfLengths(alone, lambda sample: 1.0 if len(sample.response_ids) > 4 else 0.5, seed=0, max_new_tokens=7)
        mine._comm = SimpleNamespace(  # type: ignore[assignment]
            rank=rank,
            world=2,
            phase=alone.comm.phase,
            all_gather_object=lambda item: gathered.append(item) or gathered,  # type: ignore[func-returns-value]
        )
        found = mine.evaluate([prompt for _, prompt in prompts], temperature=1.0)
    # The means of the ranks' means would be 0.5, 4.75, 0.75 and 0.5.
    wanted = {"accuracy": 1 / 3, "response_tokens": 4.0, "reward": 2 / 3, "truncated": 1 / 3}
    assert {name: found[f"eval/{name}"] for name in wanted} == pytest.approx(wanted)


def test_images_go_to_the_engine_and_its_ids_come_back(tmp_path: Path) -> None:
    save_tiny_vlm(tmp_path, "qwen2_5_vl")
    strategy = create_strategy(GRPOConfig(strategy="single"))
    strategy.setup_distributed()
    policy = strategy.prepare(load_policy(str(tmp_path), materialize=True))
    strategy.tokenizer, media = load_tokenizer(str(tmp_path)), tiny_media("qwen2_5_vl")
    strategy.setup_inference_engine(None, "native", actor=policy)
    checkered(84, 56).save(tmp_path / "a.png")
    ids = media.processor.tokenizer.encode(f"a{IMAGE}b")
    picture = Prompt(index=0, text="", token_ids=tuple(ids), images=(str(tmp_path / "a.png"),))
    plain = Prompt(index=1, text="", token_ids=tuple(media.processor.tokenizer.encode("ab")))
    samples = sample(strategy, [(0, picture), (1, plain)])
    assert [len(item.prompt_ids) for item in samples] == [5 - 1 + 6] * 2 + [2] * 2  # 3 x 2 features
    assert samples[0].prompt_ids == media.encode(ids, [checkered(84, 56)], []).token_ids
    missing = Prompt(index=2, text="", token_ids=tuple(ids), images=(str(tmp_path / "gone.png"),))
    with pytest.raises(ValueError, match=r"there is no image .*gone.png"):
        sample(strategy, [(0, missing)])


def test_an_evaluation_may_have_a_length_of_its_own(strategy: StrategyBase, prompts: list[tuple[int, Prompt]]) -> None:
    held_out, lengths = [prompt for _, prompt in prompts], []
    for longest in (0, 2, 9):
        config = GRPOConfig(
            strategy="single", max_new_tokens=4, eval=EvalConfig(max_new_tokens=longest, min_new_tokens=2)
        )
        mine = Collector(strategy, length_reward, seed=0, max_new_tokens=4, **sampling_of(config))
        lengths.append(mine.evaluate(held_out, temperature=1.0)["eval/response_tokens"])
        assert max(len(item.response_ids) for item in mine.sample(prompts, step=1, group_size=8, temperature=1.0)) <= 4
    assert lengths[1] == 2
    assert 2 < lengths[0] <= 4 <= lengths[2]


def test_end_tokens_of_ones_own_stay_beside_stop_strings(
    strategy: StrategyBase, prompts: list[tuple[int, Prompt]]
) -> None:
    assert strategy.tokenizer is not None
    plus, equal, one = strategy.tokenizer.convert_tokens_to_ids(["+", "=", "1"])
    own = SamplingParams(stop=("=",), stop_token_ids=(plus,))
    other = replace(own, stop=("1",), stop_token_ids=(), max_new_tokens=6)
    mine = Collector(strategy, length_reward, seed=0, max_new_tokens=6, sampling=own, evaluation=other)
    assert mine.sampling.stop_token_ids == (plus, equal)
    texts = [item.text for item in mine.sample(prompts, step=1, group_size=8, temperature=1.0)]
    assert not any({"=", "+"} & set(text[:-1]) for text in texts)
    assert {"=", "+"} <= {text[-1:] for text in texts}
    assert mine._evaluation.stop_token_ids == (one,)


def test_stop_strings_end_training_and_evaluation_samples(
    strategy: StrategyBase, prompts: list[tuple[int, Prompt]]
) -> None:
    config = GRPOConfig(strategy="single", stop=("=", "1"), eval=EvalConfig(top_k=1, min_new_tokens=3))
    mine = Collector(strategy, length_reward, seed=0, max_new_tokens=6, **sampling_of(config))
    samples = mine.sample(prompts, step=1, group_size=8, temperature=1.0)
    free = sample(strategy, prompts, group_size=8)
    assert {item.finish_reason for item in samples} >= {"stop"}
    ends = strategy.tokenizer.convert_tokens_to_ids(["=", "1"])
    assert list(mine.sampling.stop_token_ids) == ends  # so that the engine does not write on behind them
    for item, whole in zip(samples, free, strict=True):
        length = len(item.response_ids)
        assert item.response_ids == whole.response_ids[:length]
        assert item.sampler_logprobs == whole.sampler_logprobs[:length]
        assert len(item.versions) == length
        assert not {"=", "1"} & set(item.text[:-1])
        assert item.text[-1:] in ("=", "1") or item.response_ids == whole.response_ids
    # Greedy by top_k, and at least three tokens: the mean length shows that evaluation has its own settings.
    found = mine.evaluate([prompt for _, prompt in prompts], temperature=1.0)
    assert found["eval/response_tokens"] >= 3
    with pytest.raises(
        ValueError, match=r"top_p=0.9, min_new_tokens=2: a trainer computes logprobs at the temperature"
    ):
        Collector(
            strategy, length_reward, seed=0, max_new_tokens=6, sampling=SamplingParams(top_p=0.9, min_new_tokens=2)
        )
