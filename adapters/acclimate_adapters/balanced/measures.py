"""What `balanced` estimates of a client without labels: class prior, evidence of label shift, drift.

Equations are numbered in the docstring of `Balanced`. Few numbers are involved, so all of it is computed on the host.
"""

import math

import numpy as np

from acclimate_adapters.balanced.moments import TINY
from acclimate_adapters.functional import Numbers, log_softmax


def map_em(
    log_p: Numbers, earlier: Numbers, rows: float, prior: Numbers, pseudo_rows: float, steps: int
) -> tuple[Numbers, Numbers]:
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
    likelihood = np.exp(log_p) / prior  # [B, K], up to a row constant
    columns = likelihood.T / total
    p = known * (total / (rows + pseudo_rows))
    for _ in range(steps):
        p = known + p * columns.dot(np.reciprocal(likelihood.dot(p)))
    return p, log_softmax(log_p + np.log(p / prior))


def label_shift_evidence(posterior: Numbers, rows: float, prior: Numbers, concentration: float) -> float:
    """Log Bayes factor of some class mix against the training prior (6).

    Args:
        posterior: q [K], mean over a client's rows.
        rows: N, how many of them count, >= 0.
        prior: p_s [K], positive, sum 1.
        concentration: `gate_concentration`.
    """
    counts, alpha = rows * posterior, concentration * len(prior) * prior
    mixes = _log_gamma(alpha.sum()) - _log_gamma(counts.sum() + alpha.sum())
    classes = sum(_log_gamma(c + a) - _log_gamma(a) for c, a in zip(counts.tolist(), alpha.tolist(), strict=True))
    return float(mixes + classes - counts.dot(np.log(prior)))


def _log_gamma(x: float) -> float:
    """Infinite at the poles, where `math.lgamma` raises: only counts below 0 come there, and end as no answer."""
    try:
        return math.lgamma(x)
    except ValueError:
        return math.inf


def log_sigmoid(x: float) -> float:
    """Logarithm of 1 / (1 + exp(-x))."""
    return -float(np.logaddexp(0.0, -x))


def prediction_drift(batch: Numbers, before: Numbers) -> float:
    """1 - cosine of two mean posteriors [K] (8); 1 where one of them is 0, as of a state that was made elsewhere."""
    lengths = math.sqrt(float(batch.dot(batch)) * float(before.dot(before)))
    return 1 - float(batch.dot(before)) / max(lengths, TINY)


def style_distance(batch: Numbers, before: Numbers, row_variance: Numbers) -> float:
    """Mean over channels of (batch - before)^2 / omega, all [c]; channels without variance count as 0 (8)."""
    varies = row_variance > TINY
    distance = np.divide(np.square(batch - before), row_variance, out=np.zeros_like(row_variance), where=varies)
    return float(distance.mean())
