"""A minimum of tokens and penalties in the native engine, against logits changed by hand."""

import math
from typing import Any

import numpy as np
import torch
from torch.testing import assert_close

from lightrl.engines.base import SamplingParams
from lightrl.engines.native.constraints import constrain, penalise
from lightrl.engines.native.engine import NativeEngine
from lightrl.engines.native.scheduler import Request, RunningSamples
from lightrl.testing.tiny_training import tiny_policy


def plain_model() -> Any:
    model: Any = tiny_policy().hf.eval()
    model.set_attn_implementation("eager")
    return model


def test_penalties_by_hand() -> None:
    scores = torch.tensor([2.0, -2.0, 1.0, 4.0, 0.5])
    params = SamplingParams(repetition_penalty=2.0, presence_penalty=0.5, frequency_penalty=0.25)
    penalise(scores, params, (0, 1), [3, 3, 1])
    # 0 and 1 were in the prompt, 3 and 1 generated: 2/2, -2*2, 4/2; then 1: -0.5-0.25, 3: -0.5-2*0.25
    assert_close(scores, torch.tensor([1.0, -4.75, 1.0, 1.0, 0.5]), atol=1e-6, rtol=0)


def test_each_row_is_changed_as_its_own_request_asks() -> None:
    asked = [
        SamplingParams(),  # of a row before those that draw
        SamplingParams(min_new_tokens=2, stop_token_ids=(3,)),
        SamplingParams(min_new_tokens=1, presence_penalty=0.5),  # has its one token
        SamplingParams(min_new_tokens=2, stop_token_ids=(3,), ignore_eos=True),
    ]
    rows = RunningSamples(len(asked))
    for row, params in enumerate(asked):
        rows.fill(slice(row, row + 1), Request(row, (4,), params))
    rows.num_produced[2], rows.outputs["token"][2, 0] = 1, 2
    logits = torch.zeros(3, 5)
    found = constrain(logits, rows, 1, np.array([True, False, False, False, False]))
    none = -math.inf
    wanted = [[none, 0.0, 0.0, none, 0.0], [0.0, 0.0, -0.5, 0.0, 0.0], [0.0, 0.0, 0.0, none, 0.0]]
    assert found.tolist() == wanted
    assert not logits.any()  # they may be kept for another sample of the prompt


def test_no_end_comes_before_the_minimum_and_logprobs_are_of_what_is_left() -> None:
    model = plain_model()
    prompt = [3, 1, 4]
    with torch.no_grad():
        likeliest = int(model(input_ids=torch.tensor([prompt]), use_cache=False).logits[0, -1].argmax())
    engine = NativeEngine(model, eos_token_ids={likeliest}, device=torch.device("cpu"))
    greedy = {"temperature": 0.0, "max_new_tokens": 4}
    ended, forced, free = engine.generate(
        [prompt] * 3,
        [
            SamplingParams(**greedy),
            SamplingParams(**greedy, min_new_tokens=3, presence_penalty=0.3, repetition_penalty=1.2),
            SamplingParams(temperature=0.0, max_new_tokens=3, ignore_eos=True, min_new_tokens=2),
        ],
    )
    assert (list(ended.output_token_ids), ended.finish_reason) == ([likeliest], "stop")
    assert free.output_token_ids[0] == likeliest  # an end token that does not end is a token like any other
    assert len(forced.output_token_ids) >= 3
    assert likeliest not in forced.output_token_ids[:3]
    reference = plain_model()
    produced: list[int] = []
    for token, logprob in zip(forced.output_token_ids, forced.logprobs, strict=True):
        with torch.no_grad():
            scores = reference(input_ids=torch.tensor([[*prompt, *produced]]), use_cache=False).logits[0, -1]
        for seen in {*prompt, *produced}:
            scores[seen] = scores[seen] / 1.2 if scores[seen] > 0 else scores[seen] * 1.2
        for seen in set(produced):
            scores[seen] -= 0.3
        if len(produced) < 3:
            scores[likeliest] = -math.inf
        assert int(scores.argmax()) == token
        assert_close(logprob, float(scores.log_softmax(-1)[token]), atol=1e-5, rtol=0)
        produced.append(token)
