"""The tokens that the native engine reports are those that top-p and top-k leave of a plain forward."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from lightrl.engines.base import Completion, SamplingParams
from lightrl.engines.native.truncated import TruncatedEngine

CPU = torch.device("cpu")
PROMPTS = ([5, 6, 7], [8], [9, 10, 11, 12, 13], [14, 15])


def check(model: torch.nn.Module, done: Completion, params: SamplingParams) -> None:
    """Sorts the probabilities of a plain forward: token j stays if it is in the top k and the mass before it is < p."""
    tokens = [*done.prompt_token_ids, *done.output_token_ids]
    with torch.no_grad():
        logits = model(torch.tensor([tokens])).logits[0, len(done.prompt_token_ids) - 1 : -1] / params.temperature
    assert done.allowed is not None
    assert done.allowed.dtype == np.int32
    for index, (row, token) in enumerate(zip(logits, done.output_token_ids, strict=True)):
        order = row.argsort(descending=True)[: params.top_k]
        mass = row[order].softmax(-1).cumsum(-1)
        expected = order[: int((mass < params.top_p).sum()) + 1].tolist()
        reported = done.allowed[done.allowed[:, 0] == index, 1].tolist()
        assert sorted(reported) == sorted(expected)
        assert token in reported
        own = row[token] - row[torch.tensor(reported)].logsumexp(-1)
        assert abs(done.logprobs[index] - own.item()) < 1e-5


@pytest.mark.parametrize("max_num_seqs", [3, 16])
def test_allowed_tokens_are_those_of_a_plain_forward(tiny_model, max_num_seqs: int) -> None:
    model = tiny_model("qwen2")
    plain = AutoModelForCausalLM.from_config(model.config, attn_implementation="eager").eval()
    plain.load_state_dict(model.state_dict())
    engine = TruncatedEngine(model, eos_token_ids=[2], device=CPU, max_num_seqs=max_num_seqs)
    params = [
        SamplingParams(
            max_new_tokens=3 + i, n=3, seed=i, ignore_eos=i % 2 == 0, temperature=0.5, top_p=0.8, top_k=5 + i
        )
        for i in range(len(PROMPTS))
    ]
    done = engine.generate(PROMPTS, params)
    assert len(done) == 12
    for index, completion in enumerate(done):
        check(plain, completion, params[index // 3])
    assert engine._allowed == {}

    first, whole = engine.submit(PROMPTS[0], params[3]), engine.submit(PROMPTS[1], SamplingParams(max_new_tokens=9))
    for _ in range(3):
        engine.step()
    for completion in engine.abort([first]):
        check(plain, completion, params[3])
    rest = [item for _ in range(9) for item in engine.step()]
    assert {item.request_id for item in rest} == {whole}
    assert all(item.allowed is None or not len(item.allowed) for item in rest)  # it could draw any token
    assert engine._allowed == {}
