"""Guessed tokens: the same samples as without guesses, whatever is guessed, and the distribution of a plain forward."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from lightrl.config import GRPOConfig
from lightrl.config.native import NativeEngineConfig
from lightrl.engines.base import Completion, EngineGroup, SamplingParams
from lightrl.engines.native import lookup
from lightrl.engines.native.engine import NativeEngine, build_native_engine
from lightrl.engines.native.lookup import LookupEngine, continuation

CPU = torch.device("cpu")
PROMPTS = [[5, 6, 7, 8, 5, 6, 7], [8, 9], [9, 10, 11, 9, 10, 11, 12, 9, 10], [14, 15, 3, 4, 14, 15]]


def test_what_followed_the_last_tokens_before_is_guessed() -> None:
    def guess(text: list[int], most: int) -> list[int]:
        return continuation(np.array(text), most).tolist()

    assert guess([1, 2, 3, 4, 9, 1, 2], 2) == [3, 4]
    assert guess([1, 2, 3, 4, 9, 1, 2], 9) == [3, 4, 9, 1, 2, 3, 4, 9, 1]
    assert guess([1, 2, 3, 1, 2, 4, 1, 2], 1) == [4]  # the latest time
    assert guess([7, 1, 2, 3, 8, 1, 2, 4, 7, 1, 2], 1) == [3]  # the longer match
    assert guess([1, 1, 1], 3) == [1, 1, 1]
    assert guess([3, 2, 1, 2], 3) == []  # one token alone is no match
    assert guess([1, 2, 1, 2], 0) == []
    assert guess([1], 3) == []


def made(engine: NativeEngine, params: list[SamplingParams]) -> list[Completion]:
    return engine.generate(PROMPTS, params)


def same(one: list[Completion], other: list[Completion]) -> None:
    for a, b in zip(one, other, strict=True):
        assert (a.output_token_ids, a.finish_reason, a.versions) == (b.output_token_ids, b.finish_reason, b.versions)
        assert np.allclose(a.logprobs, b.logprobs, atol=1e-5, rtol=0)


@pytest.mark.parametrize("family", ["llama", "qwen2", "mistral"])  # qwen2 and mistral have sliding windows
@pytest.mark.parametrize("temperature", [0.0, 0.3])
def test_the_samples_are_those_without_guesses(tiny_model, family: str, temperature: float) -> None:
    params = [
        SamplingParams(
            max_new_tokens=(1, 20, 33, 47)[index],
            n=3,
            seed=index,
            temperature=temperature,
            top_p=(1.0, 0.9)[index % 2],
            stop_token_ids=((), (17, 31))[index % 2],
            ignore_eos=index == 3,
        )
        for index in range(4)
    ]
    plain = NativeEngine(tiny_model(family), eos_token_ids=[2], device=CPU, max_num_seqs=5)
    guessing = LookupEngine(tiny_model(family), eos_token_ids=[2], device=CPU, max_num_seqs=5, num_guesses=4)
    same(made(guessing, params), made(plain, params))
    assert 0 < guessing.num_right < guessing.num_guessed


def test_an_aborted_sample_goes_on_with_the_same_tokens(tiny_model) -> None:
    params = SamplingParams(max_new_tokens=40, n=2, temperature=0.3, ignore_eos=True)
    engine = LookupEngine(tiny_model("llama"), eos_token_ids=[2], device=CPU, num_guesses=3)
    whole = engine.generate([PROMPTS[2]], [params])
    engine.submit(PROMPTS[2], params)
    for _ in range(7):
        engine.step()
    stopped = engine.abort()
    for item, expected in zip(stopped, whole, strict=True):
        assert 0 < len(item.output_token_ids) < 40
        assert item.output_token_ids == expected.output_token_ids[: len(item.output_token_ids)]
    heads = [item.output_token_ids for item in stopped]
    ends = engine.generate(
        [[*PROMPTS[2], *head] for head in heads],
        [
            replace(params, n=1, first_sample=index, first_token=len(head), max_new_tokens=40 - len(head))
            for index, head in enumerate(heads)
        ],
    )
    found = [(*head, *end.output_token_ids) for head, end in zip(heads, ends, strict=True)]
    assert found == [item.output_token_ids for item in whole]


def test_an_idle_engine_forgets_how_good_its_guesses_were(tiny_model, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that continues has a new engine: the same steps must guess the same, for a guess changes how sums round."""
    params = SamplingParams(max_new_tokens=40, n=2, temperature=0.3, ignore_eos=True)
    new, used = (LookupEngine(tiny_model("llama"), eos_token_ids=[2], device=CPU, num_guesses=3) for _ in range(2))
    with monkeypatch.context() as patch:
        patch.setattr(lookup, "continuation", lambda text, most: np.zeros(max(0, most), np.int64))
        used.generate([PROMPTS[2]], [params])
    num_before = used.num_guessed
    assert used.num_right < num_before / 4  # so few that it stops guessing
    wanted, found = (engine.generate([PROMPTS[2]], [params]) for engine in (new, used))
    assert 0 < new.num_guessed == used.num_guessed - num_before
    assert [sample.logprobs for sample in found] == [sample.logprobs for sample in wanted]


def test_what_fills_up_the_guesses_of_a_row_is_no_guess(tiny_model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows with fewer guesses are filled up with zeros, and here each draw is a zero."""
    monkeypatch.setattr(lookup, "continuation", lambda text, most: np.zeros(max(0, most), np.int64))
    engine = LookupEngine(tiny_model("llama"), eos_token_ids=[2], device=CPU, num_guesses=3)
    engine.draw_with(lambda logits, *_: (torch.zeros(len(logits), dtype=torch.int64), torch.zeros(len(logits))))
    found = engine.generate(PROMPTS[:2], [SamplingParams(max_new_tokens=count) for count in (2, 9)])
    assert [item.output_token_ids for item in found] == [(0,) * 2, (0,) * 9]
    assert engine.num_right == engine.num_guessed


@pytest.mark.parametrize(("num_right", "is_refused"), [(3, True), (2, False)])
def test_a_logprob_that_is_not_finite_counts_only_where_its_token_is_taken(
    tiny_model, monkeypatch: pytest.MonkeyPatch, num_right: int, is_refused: bool
) -> None:
    monkeypatch.setattr(lookup, "continuation", lambda text, most: np.zeros(max(0, most), np.int64))
    engine = LookupEngine(tiny_model("llama"), eos_token_ids=[2], device=CPU, num_guesses=3)

    def draw(logits: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
        tokens, logprobs = torch.zeros(len(logits), dtype=torch.int64), torch.zeros(len(logits))
        if len(logits) == 8:  # the second row's last guess and the token after it; the first prompt enters with one
            tokens[4 + num_right :] = 1
            logprobs[7] = torch.nan
        return tokens, logprobs

    engine.draw_with(draw)
    for prompt in PROMPTS[:2]:
        engine.submit(prompt, SamplingParams(max_new_tokens=5))
    with pytest.raises(RuntimeError, match=r"request 1, token 1") if is_refused else nullcontext():
        engine.step()


def test_any_guess_leaves_the_distribution_as_it_is(tiny_model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts the second and third tokens of 3,000 samples, which are guessed well, half well and badly in turn."""
    model, num = tiny_model("llama"), 3000
    text, following = PROMPTS[0], []
    for _ in range(3):
        with torch.no_grad():
            following.append(model(torch.tensor([text])).logits[0, -1].double().div(0.5).softmax(-1))
        text = [*text, int(following[-1].argmax())]
    first, second, third = (int(probabilities.argmax()) for probabilities in following)
    guesses = iter([[second, third], [second, 5], [0, third]] * num)
    monkeypatch.setattr(lookup, "continuation", lambda text, most: np.array(next(guesses)[:most]))
    engine = LookupEngine(model, eos_token_ids=[2], device=CPU, max_num_seqs=512, num_guesses=2, most_rows=512)
    params = SamplingParams(max_new_tokens=4, n=num, temperature=0.5, ignore_eos=True)
    done = [item.output_token_ids for item in engine.generate([PROMPTS[0]], [params])]
    check(Counter(tokens[0] for tokens in done), following[0], num)
    seconds = [tokens[1] for tokens in done if tokens[0] == first]
    check(Counter(seconds), following[1], len(seconds))
    thirds = [tokens[2] for tokens in done if tokens[:2] == (first, second)]
    check(Counter(thirds), following[2], len(thirds))
    assert len(thirds) > 100
    assert num // 10 < engine.num_right < engine.num_guessed


def check(counts: Counter[int], probabilities: torch.Tensor, total: int) -> None:
    for token, probability in enumerate(probabilities.tolist()):
        deviation = (total * probability * (1 - probability)) ** 0.5
        assert abs(counts[token] - total * probability) < 4.5 * deviation + 1, token


def test_many_rows_and_constraints_are_drawn_one_token_at_a_time(tiny_model) -> None:
    engine = LookupEngine(tiny_model("llama"), eos_token_ids=[2], device=CPU, num_guesses=4, most_rows=2)
    engine.generate([PROMPTS[0]], [SamplingParams(max_new_tokens=9, n=3, temperature=0.0, ignore_eos=True)])
    penalised = SamplingParams(max_new_tokens=9, temperature=0.0, ignore_eos=True, repetition_penalty=1.1)
    engine.generate([PROMPTS[0]], [penalised])
    assert engine.num_guessed == 0


def test_a_model_without_a_fused_forward_is_run_plainly(tiny_model) -> None:
    engine = LookupEngine(tiny_model("gpt2"), eos_token_ids=[2], device=CPU, num_guesses=4)
    params = SamplingParams(max_new_tokens=9, temperature=0.0, ignore_eos=True)
    plain = NativeEngine(tiny_model("gpt2"), eos_token_ids=[2], device=CPU)
    same(engine.generate([PROMPTS[0]], [params]), plain.generate([PROMPTS[0]], [params]))
    assert engine.num_guessed == 0


def test_the_option_makes_such_an_engine(tiny_model) -> None:
    def build(options: GRPOConfig) -> NativeEngine:
        parts: dict[str, Any] = {"tokenizer": None, "device": CPU, "group": EngineGroup()}
        return build_native_engine(source=tiny_model("llama"), options=options, **parts)

    assert type(build(GRPOConfig())) is NativeEngine
    assert isinstance(build(GRPOConfig(native=NativeEngineConfig(lookup=3))), LookupEngine)
