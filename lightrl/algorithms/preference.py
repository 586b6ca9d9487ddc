"""Losses over pairs of answers, of which one is preferred: reward models (Bradley-Terry) and DPO with its kin.

Each gives a term per pair, [P]; the mean is taken outside, over all pairs of the update. A log-ratio margin is
log(policy / reference) of the chosen answer minus that of the rejected one, each summed over the answer's tokens (or
averaged over them, where lengths are to be normalised away).
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from lightrl.algorithms.shapes import require_flat
from lightrl.algorithms.tokens import sequence_means, sequence_sums

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
    """[num_sequences] log(policy / reference) of each answer: the sum over its trained tokens, or their mean.

    Args:
        logprobs, ref_logprobs: [N], an entry per token; only the first gets a gradient.
        mask: [N] bool, True = trained. What stands elsewhere is never read.
    """
    ratios = torch.where(mask, logprobs - ref_logprobs.detach(), 0.0)
    if length_normalized:
        return sequence_means(ratios, mask, sequence_index, num_sequences)
    return sequence_sums(ratios, sequence_index, num_sequences)


def preference_terms(kind: PreferenceLoss, margins: Tensor, *, beta: float, label_smoothing: float = 0.0) -> Tensor:
    """The loss of each pair, from its log-ratio margin h.

    sigmoid (DPO, arXiv:2305.18290, eq. 7): -(1 - s) log sigmoid(beta h) - s log sigmoid(-beta h), where s is the share
    of labels that are wrong (conservative DPO). ipo (arXiv:2310.12036, eq. 17): (h - 1 / (2 beta))^2. hinge (SLiC,
    arXiv:2305.10425): max(0, 1 - beta h).
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
    """-log sigmoid(chosen - rejected - margin) + centring_coef (chosen + rejected)^2 of each pair of scores, [P].

    The difference leaves the level of the scores free; the second term (arXiv:2312.09244, sec. 2) holds it near 0.

    Args:
        margins: by how much the chosen answer should win (Llama 2, arXiv:2307.09288, eq. 2); None is 0.
    """
    require_flat(chosen=chosen, rejected=rejected, margins=margins)
    difference = chosen - rejected
    terms = -F.logsigmoid(difference if margins is None else difference - margins)
    return terms + centring_coef * (chosen + rejected).square() if centring_coef else terms


def pair_mean(terms: Tensor) -> Tensor:
    """The micro-batch's loss; 0 with a gradient of 0 that flows where there is no pair."""
    return terms.sum() / max(len(terms), 1)
