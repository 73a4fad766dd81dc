"""What `balanced` estimates of a client without labels: class prior, evidence of label shift, drift.

Equations are numbered in the docstring of `Balanced`.
"""

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from acclimate_adapters.functional import single
from acclimate_adapters.moments import TINY


def log_softmax(logits: Tensor) -> Tensor:
    """Log-probabilities [B, K], in single precision at least.

    Not torch's on the CPU, and neither is `exp`: these wake torch's threads even for a few rows, and until they sleep
    again, milliseconds later, they hold the core that ONNX Runtime wants for the next pass.
    """
    logits = single(logits)
    if logits.device.type != "cpu":
        return torch.log_softmax(logits, dim=-1)
    values = logits.numpy()
    shifted = values - values.max(-1, keepdims=True)
    return torch.from_numpy(shifted - np.log(np.exp(shifted).sum(-1, keepdims=True)))


def exp(log_p: Tensor) -> Tensor:
    """Probabilities of log-probabilities, of the same shape and precision."""
    return torch.from_numpy(np.exp(log_p.numpy())) if log_p.device.type == "cpu" else log_p.exp()


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
    x, q, before = (tensor.cpu().double().numpy() for tensor in (log_p, prior, earlier))
    known = (before + pseudo_rows * q) / total
    likelihood = np.exp(x) / q  # [B, K], up to a row constant
    columns = likelihood.T / total
    p = known * (total / (rows + pseudo_rows))
    for _ in range(steps):
        p = known + p * (columns @ (1 / (likelihood @ p)))
    posteriors = log_softmax(torch.from_numpy(x + np.log(p / q)))
    return torch.from_numpy(p).to(log_p), posteriors.to(log_p)


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
