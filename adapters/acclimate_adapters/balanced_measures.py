"""What `balanced` estimates of a client without labels: class prior, evidence of label shift, drift.

Equations are numbered in the docstring of `Balanced`.
"""

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from acclimate_adapters.moments import TINY


def map_em(
    log_p: Tensor, earlier: Tensor, rows: float, prior: Tensor, pseudo_rows: float, steps: int
) -> tuple[Tensor, Tensor]:
    """Maximum a posteriori estimate of a client's prior by EM (5).

    Args:
        log_p: [B, K], log-posteriors under the training prior.
        earlier: [K], sum of the posteriors of earlier rows.
        rows: how many those were.
        prior: p_s [K], positive, sum 1.
        pseudo_rows: weight of p_s in the estimate, > 0.
        steps: EM steps.

    Returns:
        The prior [K], positive, sum 1, and the log-posteriors [B, K] under it.
    """
    total = rows + len(log_p) + pseudo_rows
    known = (earlier + pseudo_rows * prior) / total
    likelihood = log_p.exp() / prior  # [B, K], up to a row constant
    columns = likelihood.T / total
    p = known * (total / (rows + pseudo_rows))
    for _ in range(steps):
        p = torch.addcmul(known, p, columns @ (likelihood @ p).reciprocal())
    return p, torch.log_softmax(log_p + (p / prior).log(), dim=-1)


def label_shift_evidence(posterior: Tensor, rows: float, prior: Tensor, concentration: float) -> Tensor:
    """Log Bayes factor [] of some class mix against the training prior, in double precision on the CPU (6).

    Args:
        posterior: q [K], mean over a client's rows.
        rows: N, how many of them count, >= 0.
        prior: p_s [K], positive, sum 1.
        concentration: `gate_concentration`.
    """
    prior = prior.cpu().double()
    counts, alpha = rows * posterior.cpu().double(), concentration * len(prior) * prior
    mixes = torch.lgamma(alpha.sum()) - torch.lgamma(counts.sum() + alpha.sum())
    return mixes + (torch.lgamma(counts + alpha) - torch.lgamma(alpha) - counts * prior.log()).sum()


def prediction_drift(batch: Tensor, before: Tensor) -> Tensor:
    """1 - cosine [] of two mean posteriors [K] (8)."""
    return 1 - F.cosine_similarity(batch, before, dim=0)


def style_distance(batch: Tensor, before: Tensor, row_variance: Tensor) -> Tensor:
    """Mean over channels of (batch - before)^2 / omega, all [c]; channels without variance count as 0 (8)."""
    distance = (batch - before).square() / row_variance
    return torch.where(row_variance > TINY, distance, 0.0).mean()
