from __future__ import annotations

import math

import torch
from torch.testing import assert_close

from lightrl.algorithms.distillation import distillation_advantages, distillation_terms, reverse_kl

STUDENT = torch.tensor([math.log(0.5), math.log(0.25), math.nan])
TEACHER = torch.tensor([math.log(0.25), math.log(0.5), 0.0])
MASK = torch.tensor([True, True, False])


def test_tokens_that_the_teacher_finds_likelier_have_a_good_advantage() -> None:
    # 2 (log 0.25 - log 0.5) = -1.3862944, and the other way
    found = distillation_advantages(STUDENT, TEACHER, MASK, coef=2.0)
    assert_close(found, torch.tensor([-1.3862944, 1.3862944, 0.0]), atol=1e-6, rtol=0)


def test_the_sampled_loss_has_the_value_k1_and_the_slope_of_the_kl() -> None:
    # log student - log teacher = 0.6931472 and -0.6931472; so are the slopes
    student = STUDENT.clone().requires_grad_()
    terms = distillation_terms(student, TEACHER, MASK)
    terms.sum().backward()
    expected = torch.tensor([0.6931472, -0.6931472, 0.0])
    assert_close(terms.detach(), expected, atol=1e-6, rtol=0)
    assert_close(student.grad, expected, atol=1e-6, rtol=0)


def test_off_policy_tokens_are_weighed() -> None:
    # Sampled at 1/4 and 1/4: ratios 2 and 1
    old = torch.full((3,), math.log(0.25))
    terms = distillation_terms(STUDENT, TEACHER, MASK, old_logprobs=old)
    assert_close(terms, torch.tensor([1.3862944, -0.6931472, 0.0]), atol=1e-6, rtol=0)


def test_reverse_kl_over_the_vocabulary() -> None:
    # 0.75 ln 1.5 + 0.25 ln 0.5 = 0.1308120; equal ones 0; a token that neither has counts nothing
    policy = torch.tensor([[0.75, 0.25, 0.0], [0.5, 0.5, 0.0]]).log()
    teacher = torch.tensor([[0.5, 0.5, 0.0], [0.5, 0.5, 0.0]]).log()
    assert_close(reverse_kl(policy, teacher), torch.tensor([0.1308120, 0.0]), atol=1e-6, rtol=0)


def test_reverse_kl_gradient_agrees_with_finite_differences() -> None:
    logits = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    teacher = torch.randn(3, 5, dtype=torch.float64).log_softmax(-1)
    assert torch.autograd.gradcheck(lambda leaf: reverse_kl(leaf.log_softmax(-1), teacher).sum(), (logits,))


def test_the_teacher_and_the_advantages_get_no_gradient() -> None:
    student, teacher = (part.clone().requires_grad_() for part in (STUDENT, TEACHER))
    assert not distillation_advantages(student, teacher, MASK).requires_grad
    everything = torch.tensor([[0.75, 0.25]]).log()
    assert not reverse_kl(everything, everything.clone().requires_grad_()).requires_grad
