"""Losses over pairs of a preferred and a rejected answer: reward models (Bradley-Terry), DPO and its variants.

Each gives one term per pair, [P]; the caller takes the mean over all pairs of the update. A log-ratio margin is
log(policy / reference) of the chosen answer minus that of the rejected one, each summed over the answer's tokens, or
averaged over them to normalise by length.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from lightrl.algorithms.losses import masked_difference, nan_unless_finite, require_flat, sequence_means, sequence_sums

PreferenceLoss = Literal["sigmoid", "ipo", "hinge"]


def answer_log_ratios(
    logprobs: Tensor,
    ref_logprobs: Tensor,
    mask: Tensor,
    sequence_index: Tensor,
    num_sequences: int,
    *,
    length_normalized: bool = False,
) -> Tensor:
    """Returns log(policy / reference) of each answer, [num_sequences]: the sum or mean over its trained tokens.

    Args:
        logprobs: Of the policy, [N]; they alone get a gradient.
        ref_logprobs: Of the reference, [N].
        mask: True = trained, [N] bool; other entries are never read.
        sequence_index: The answer of each token, [N].
        num_sequences: How many answers there are.
        length_normalized: Take the mean instead of the sum.
    """
    ratios = masked_difference(logprobs, ref_logprobs, mask)
    if length_normalized:
        return sequence_means(ratios, mask, sequence_index, num_sequences)
    return sequence_sums(ratios, sequence_index, num_sequences)


def preference_terms(kind: PreferenceLoss, margins: Tensor, *, beta: float, label_smoothing: float = 0.0) -> Tensor:
    """Computes the loss of each pair, [P], from its log-ratio margin h.

    - sigmoid (DPO, arXiv:2305.18290, eq. 7): -(1 - s) log sigmoid(beta h) - s log sigmoid(-beta h), where s is
      label_smoothing, the fraction of labels that are wrong (conservative DPO).
    - ipo (arXiv:2310.12036, eq. 17): (h - 1 / (2 beta))^2.
    - hinge (SLiC, arXiv:2305.10425): max(0, 1 - beta h).
    """
    if beta <= 0:
        raise ValueError(f"beta is {beta}: it must be more than 0.")
    if not 0 <= label_smoothing < 0.5:
        raise ValueError(f"label_smoothing is {label_smoothing}: it is the share of wrong labels, in [0, 0.5).")
    if label_smoothing and kind != "sigmoid":
        raise ValueError(f"label_smoothing belongs to the sigmoid loss, not to {kind}: set it to 0.")
    if kind == "sigmoid":
        right, wrong = F.logsigmoid(beta * margins), F.logsigmoid(-beta * margins)
        return -(1 - label_smoothing) * right - label_smoothing * wrong
    if kind == "ipo":
        return (margins - 1 / (2 * beta)).square()
    if kind == "hinge":
        return torch.relu(1 - beta * margins)
    raise ValueError(f"Unknown preference loss {kind!r}. Choose one of sigmoid, ipo, hinge.")


def bradley_terry_terms(
    chosen: Tensor, rejected: Tensor, *, margins: Tensor | None = None, centring_coef: float = 0.0
) -> Tensor:
    """Computes -log sigmoid(chosen - rejected - margin) + centring_coef (chosen + rejected)^2 of each pair, [P].

    The difference leaves the level of the scores free; the second term (arXiv:2312.09244, sec. 2) keeps it near 0.

    Args:
        chosen: Scores of the preferred answers, [P].
        rejected: Scores of the other answers, [P].
        margins: How much the chosen answer should win by (Llama 2, arXiv:2307.09288, eq. 2), [P]; None is 0.
        centring_coef: Weight of the second term.
    """
    require_flat(chosen=chosen, rejected=rejected, margins=margins)
    difference = nan_unless_finite(chosen - rejected)
    terms = -F.logsigmoid(difference if margins is None else difference - margins)
    return terms + centring_coef * (chosen + rejected).square() if centring_coef else terms


def pair_mean(terms: Tensor) -> Tensor:
    """Returns the micro-batch's loss: the mean of the terms, or without pairs a 0 that is still part of the graph."""
    return terms.sum() / max(len(terms), 1)
