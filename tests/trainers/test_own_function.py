"""A loss of the user's, or another function of an algorithm, that does something else in a run than in its trial."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from made_samples import made_sample

from lightrl.algorithms.losses import PolicyTokens, TokenWeights, policy_gradient, token_mean
from lightrl.algorithms.registry import LossTraits, parameters_of, traits_of
from lightrl.config import AlgorithmConfig
from lightrl.data.packing import pack
from lightrl.metrics import Statistics
from lightrl.records import Experience, TokenScores
from lightrl.trainers.objective import PolicyLoss

CHANGES: list[Any] = []  # of the result, once the trial is over


def changed(result: Any) -> Any:
    return CHANGES[0](result) if CHANGES else result


def own(tokens: PolicyTokens, *, scale: float = 1.0) -> Any:
    return changed(policy_gradient(tokens))


def own_mean(mask: torch.Tensor, sequence_index: torch.Tensor, num_sequences: int) -> Any:
    return changed(token_mean(mask, sequence_index, num_sequences))


def own_kl(policy: torch.Tensor, reference: torch.Tensor) -> Any:
    return changed(policy - reference)


def loss_after(change: Any, **options: Any) -> float:
    """Returns the loss of two tokens from functions whose results change once they have passed their trial."""
    CHANGES.clear()
    loss = PolicyLoss(AlgorithmConfig(**options))
    sample = made_sample(response_ids=(5, 6), sampler_logprobs=(-1.0, -1.0))
    batch = pack(
        [Experience(sample=sample, reward=1.0, advantage=1.0)], temperature=1.0, ref_logprobs={sample.key: [-1.0, -1.0]}
    )
    logprobs = torch.tensor([-1.0, -2.0], requires_grad=True)
    CHANGES[:] = [change] if change else []
    scores = TokenScores(logprobs=logprobs, entropy=torch.zeros(2))
    return float(loss.loss(scores, batch, Statistics()).detach())


OWN_LOSS = {"loss": f"{__name__}:own", "loss_args": ("scale=2.0",)}
OWN_MEAN = {"aggregation": f"{__name__}:own_mean"}
OWN_KL = {"kl_estimator": f"{__name__}:own_kl", "kl_coef": 0.5}


def own_averaged(tokens: PolicyTokens) -> Any:
    return replace(policy_gradient(tokens), terms=policy_gradient(tokens).terms.mean())


def test_the_trial_checks_what_the_run_does() -> None:
    wanted = rf"--algorithm.loss {__name__}:own_averaged.* returned a TokenLoss with values of shape \[\]\. It must"
    with pytest.raises(ValueError, match=wanted):
        PolicyLoss(AlgorithmConfig(loss=f"{__name__}:own_averaged"))


def test_traits_and_parameters_are_those_of_the_function() -> None:
    CHANGES.clear()
    loss = PolicyLoss(AlgorithmConfig(**OWN_LOSS))._policy_loss  # type: ignore[arg-type]
    assert traits_of(loss, LossTraits).selects_tokens is None
    assert parameters_of(loss)["scale"] == 2.0


def test_results_as_in_the_trial_are_taken() -> None:
    assert loss_after(None, **OWN_LOSS, **OWN_MEAN) == 1.5  # (1 + 2) / 2
    assert loss_after(None, **OWN_LOSS, **OWN_KL) == 1.25  # minus 0.5 * (0 + 1) / 2


@pytest.mark.parametrize(
    ("options", "change", "text"),
    [
        (
            OWN_LOSS,
            lambda _: None,
            r"returned None\. It must return a TokenLoss with values of shape \[2\]",
        ),
        (OWN_LOSS, lambda it: it.terms, r"returned a Tensor with values of shape \[2\]\. It must"),
        (
            OWN_LOSS,
            lambda it: replace(it, terms=it.terms.mean()),
            r"returned a TokenLoss with values of shape \[\]\. It must",
        ),
        (OWN_MEAN, lambda _: 1.0, r"returned a float\. It must return a TokenWeights"),
        (
            OWN_MEAN,
            lambda it: TokenWeights(weights=it.weights[:1], total=it.total),
            r"returned a TokenWeights with values of shape \[1\]",
        ),
        (OWN_KL, lambda it: it.mean(), r"returned a Tensor with values of shape \[\]"),
    ],
)
def test_another_result_is_named(options: dict[str, Any], change: Any, text: str) -> None:
    with pytest.raises(TypeError, match=rf"--algorithm\.\w+ {__name__}:own\w* {text}"):
        loss_after(change, **options)


def test_settings_of_torch_that_it_leaves_changed_are_named() -> None:
    def without_gradients(result: Any) -> Any:
        torch.set_grad_enabled(False)
        return result

    try:
        with pytest.raises(RuntimeError, match=rf"--algorithm.loss {__name__}:own has changed settings of torch"):
            loss_after(without_gradients, **OWN_LOSS)
    finally:
        torch.set_grad_enabled(True)
