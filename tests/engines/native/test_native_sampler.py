import math

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from lightrl.engines.native import sampler
from lightrl.engines.native.sampler import PLAIN, SAMPLING, exact_running_sums, keep_top, plan_sampling, sample

CPU = torch.device("cpu")
LOG = torch.tensor([[0.1, 0.2, 0.3, 0.4]]).log()


def plan(rows, temperature=1.0, top_p=1.0, top_k=0, vocab=4):
    asked = np.empty(rows, SAMPLING)
    asked["temperature"], asked["top_p"], asked["top_k"] = temperature, top_p, top_k
    return plan_sampling(asked, vocab, CPU)


def test_one_row_that_asks_for_something_makes_a_plan():
    asked = np.array([(1, 1, 0), (1, 1, 2), (0.5, 1, 0)], SAMPLING)
    made = plan_sampling(asked, 4, CPU)
    assert made.filters.rows.tolist() == [1]
    assert made.temperature.tolist() == [[1.0], [1.0], [0.5]]
    assert plan_sampling(asked[:1], 4, CPU) is PLAIN


def test_the_draw_inverts_the_cumulative_distribution():
    # cumulative 0.1, 0.3, 0.6, 1: 0.05 is token 0, 0.25 token 1, 0.35 token 2, 0.95 token 3
    uniforms = torch.tensor([0.05, 0.25, 0.35, 0.95], dtype=torch.float64)
    tokens, logprobs = sample(LOG.expand(4, -1) + 5.0, uniforms, plan(4))
    assert tokens.tolist() == [0, 1, 2, 3]
    assert_close(logprobs, LOG[0], atol=1e-6, rtol=0)


def test_sums_by_integers_are_those_of_floats():
    weights = torch.randn(3, 5000, generator=torch.Generator().manual_seed(0)).mul(4).softmax(-1)
    weights[0, 10:20] = 0
    sums = exact_running_sums(weights)
    assert_close(sums, weights.double().cumsum(-1), atol=1e-15, rtol=0)
    assert (sums.diff() > 0).equal(weights[:, 1:] > 0)  # so that no token of weight 0 is drawn
    assert exact_running_sums(torch.tensor([[0.25, 0.5, 0.25]])).tolist() == [[0.25, 0.75, 1.0]]


def test_temperature_reshapes_the_distribution():
    # temperature 0.5 squares: 1, 4, 9, 16 over 30; cumulative 0.033, 0.167, 0.467, 1
    uniforms = torch.tensor([0.1, 0.5], dtype=torch.float64)
    tokens, logprobs = sample(LOG.expand(2, -1), uniforms, plan(2, temperature=0.5))
    assert tokens.tolist() == [1, 3]
    assert_close(logprobs, torch.tensor([math.log(4 / 30), math.log(16 / 30)]), atol=1e-6, rtol=0)


def test_top_k_and_then_top_p_on_what_it_leaves():
    # top 3 of 0.1 .. 0.4 leave 0.4, 0.3, 0.2 over 0.9; the mass before the third is 0.7 / 0.9 = 0.78
    kept = keep_top(LOG.expand(3, -1), torch.tensor([[3], [3], [4]]), torch.tensor([[0.75], [0.8], [0.05]]))
    assert kept.isfinite().tolist() == [
        [False, False, True, True],
        [False, True, True, True],
        [False, False, False, True],
    ]


def test_a_nucleus_ends_where_its_mass_is_reached():
    shares = torch.tensor([[0.25], [0.5], [0.51], [1e-46]])  # the last is 0 in float32
    kept = keep_top(torch.zeros(4, 4), torch.full((4, 1), 4), shares)
    assert kept.isfinite().sum(1).tolist() == [1, 2, 3, 1]


def test_logprobs_of_filtered_rows_are_renormalised_and_other_rows_are_left_alone():
    uniforms = torch.tensor([0.0, 0.0], dtype=torch.float64)
    tokens, logprobs = sample(LOG.expand(2, -1), uniforms, plan(2, top_k=[2, 0]))
    assert tokens.tolist() == [2, 0]
    assert_close(logprobs, torch.tensor([math.log(3 / 7), math.log(0.1)]), atol=1e-6, rtol=0)


def test_the_top_token_alone_is_certain():
    uniforms = torch.tensor([0.0, 0.99], dtype=torch.float64)
    tokens, logprobs = sample(LOG.expand(2, -1), uniforms, plan(2, top_k=1))
    assert (tokens.tolist(), logprobs.tolist()) == ([3, 3], [0.0, 0.0])


def test_greedy_rows_stand_beside_sampled_ones():
    uniforms = torch.tensor([0.05, 0.05], dtype=torch.float64)
    tokens, logprobs = sample(LOG.expand(2, -1), uniforms, plan(2, temperature=[0.0, 1.0], top_k=[2, 0]))
    assert tokens.tolist() == [3, 0]
    assert_close(logprobs, torch.tensor([math.log(0.4), math.log(0.1)]), atol=1e-6, rtol=0)
    tokens, _ = sample(LOG, torch.tensor([0.05], dtype=torch.float64), plan(1, temperature=0.0))
    assert tokens.tolist() == [3]


@pytest.mark.parametrize("vocab", [5, 1024, 1025, 3000, 5120])
def test_a_token_of_zero_probability_is_never_drawn(vocab):
    # Mass on a few tokens only, never on the last: uniforms at both ends must not fall on a neighbour.
    generator = torch.Generator().manual_seed(0)
    logits = torch.full((64, vocab), float("-inf"))
    for row in logits:
        row[torch.randint(0, vocab - 1, (3,), generator=generator)] = torch.randn(3, generator=generator)
    for uniform in (0.0, 0.5, 1 - 2**-24, 1 - 2**-53):
        tokens, logprobs = sample(logits, torch.full((64,), uniform, dtype=torch.float64), plan(64, vocab=vocab))
        assert logits.gather(1, tokens[:, None]).isfinite().all()
        assert logprobs.isfinite().all()


@pytest.mark.parametrize("vocab", [5, 1025, 3000])  # one search; the last block has 1 and 184 of 256 tokens
def test_the_highest_uniform_draws_no_token_behind_the_vocabulary(vocab):
    logits = torch.randn(64, vocab, generator=torch.Generator().manual_seed(0))
    logits[:, -1] = logits.amax(1) + 3
    tokens, _ = sample(logits, torch.full((64,), 1 - 2**-53, dtype=torch.float64), plan(64, vocab=vocab))
    assert tokens.tolist() == [vocab - 1] * 64


@pytest.mark.parametrize("vocab", [98, 1025, 3000])
def test_searching_by_blocks_equals_one_search(vocab):
    logits = torch.randn(200, vocab, generator=torch.Generator().manual_seed(1)) * 3
    uniforms = torch.rand(200, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    tokens, logprobs = sample(logits, uniforms, plan(200, vocab=vocab))
    cumulative = logits.double().softmax(-1).cumsum(-1)
    expected = torch.searchsorted(cumulative, uniforms[:, None], right=True).squeeze(1)
    assert torch.equal(tokens, expected)
    chosen = logits.double().log_softmax(-1).gather(1, expected[:, None]).squeeze(1).float()
    assert_close(logprobs, chosen, atol=1e-5, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [98, 3000])
def test_a_draw_does_not_depend_on_the_rows_beside_it(vocab, dtype, monkeypatch):
    monkeypatch.setattr(sampler, "_PART", 7 * vocab)  # 20 rows in parts of 7
    generator = torch.Generator().manual_seed(3)
    logits = (torch.randn(20, vocab, generator=generator) * 3).to(dtype)
    uniforms = torch.rand(20, generator=generator, dtype=torch.float64)
    tokens, logprobs = sample(logits, uniforms, PLAIN)
    alone = [sample(logits[row : row + 1], uniforms[row : row + 1], PLAIN) for row in range(20)]
    assert tokens.tolist() == [int(token) for token, _ in alone]
    assert logprobs.tolist() == [float(logprob) for _, logprob in alone]
    assert logprobs.dtype == torch.float32


def test_frequencies_follow_the_distribution():
    uniforms = (torch.arange(1000, dtype=torch.float64) + 0.5) / 1000
    tokens, _ = sample(LOG.expand(1000, -1), uniforms, plan(1000))
    assert tokens.bincount().tolist() == [100, 200, 300, 400]


def test_greedy_tells_scores_apart_that_their_probabilities_do_not():
    # 0.1 and the next float32 above it are 7e-9 apart; float32 numbers just below e^0 = 1 are 6e-8 apart.
    logits = torch.full((1, 10), 0.1)
    logits[0, 7] = torch.nextafter(torch.tensor(0.1), torch.tensor(1.0))
    tokens, _ = sample(logits, torch.tensor([0.5], dtype=torch.float64), plan(1, temperature=0.0, vocab=10))
    assert tokens.tolist() == [7]
