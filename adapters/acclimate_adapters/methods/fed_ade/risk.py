"""The risk that Fed-ADE descends: labelled anchors, weighted to the labels a batch seems to have (Eq. 4)."""

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from acclimate_adapters.errors import MissingSource
from acclimate_adapters.methods.bbse import Confusion
from acclimate_adapters.methods.simplex import LARGEST_CONDITION, nearest_mixture
from acclimate_adapters.network.model import AnchorFeatures, FrozenModel

SMALLEST_MASS = 1e-3  # share of the estimated labels on classes with anchors, below which there is no risk to follow


class LabelEstimate(NamedTuple):
    """The label distribution of a batch by Black-Box Shift Estimation."""

    labels: Tensor  # [K], double precision on the CPU; sums to 1, may be negative unless constrained
    condition: float  # condition number of the confusion matrix
    refused: bool  # it is too large, and the source prior stands in
    absent_classes: int  # classes without a measured row in the confusion matrix


def anchors_of(model: FrozenModel) -> AnchorFeatures:
    """The anchors as the classifier sees them.

    Raises:
        MissingSource: the model carries none.
    """
    if model.anchor_features is None:
        raise MissingSource("Fed-ADE needs anchors, which the model does not carry")
    return model.anchor_features


def estimate_labels(confusion: Confusion, query: Tensor, prior: Tensor, *, constrained: bool) -> LabelEstimate:
    """Label distribution w with M w = q (Eq. 4, Appendix B).

    Args:
        confusion: M [K, K], M[i, j] = P(predicted i | true j), made ready by `bbse.usable`: a column of zeros, a class
            that was never seen, is taken for perfectly predicted.
        query: q [K], mean prediction of the batch, double precision on the CPU.
        prior: [K], the answer when M is too ill-conditioned to be inverted.
        constrained: the closest w among probability vectors instead of M^-1 q.
    """
    m, absent, condition = confusion
    if condition > LARGEST_CONDITION:
        return LabelEstimate(prior.cpu().double(), condition, True, absent)
    labels = nearest_mixture(m, query) if constrained else torch.linalg.solve(m, query)
    return LabelEstimate(labels, condition, False, absent)


def anchor_importance(weights: Tensor, labels: Tensor) -> Tensor:
    """Factor r [N] of each anchor's loss, such that the mean of r * loss is the risk sum_i w_i F_i (Eq. 4).

    Args:
        weights: w [K], float64; those of classes without anchors are dropped and the others scaled to sum to 1.
        labels: [N].

    Returns:
        [N], float64, on the device of the labels; 0 when the classes with anchors have no weight.
    """
    weights = weights.to(labels.device)
    counts = torch.bincount(labels, minlength=len(weights))
    kept = torch.where(counts > 0, weights, 0)
    if float(kept.sum()) < SMALLEST_MASS:
        return torch.zeros_like(labels, dtype=weights.dtype)
    per_class = kept / kept.sum() * len(labels) / counts.clamp_min(1)
    return per_class[labels]


def minibatches(count: int, size: int, passes: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Rows of the minibatches of several passes over `count` anchors, each pass in a new order."""
    for _ in range(passes):
        yield from torch.split(torch.randperm(count, generator=generator), size)


def fit_head(
    head: Mapping[str, Tensor], anchors: AnchorFeatures, importance: Tensor, eta: float, order: Iterable[Tensor]
) -> dict[str, Tensor]:
    """Gradient descent of a linear classifier on the weighted risk of anchors (Eq. 8), with the gradient written out.

    Args:
        head: weight [K, d] and, optionally, bias [K], in this order, in single precision at least; not changed.
        anchors: features [N, d] and labels [N].
        importance: r [N].
        eta: learning rate.
        order: rows of each minibatch.
    """
    fitted = {name: tensor.clone() for name, tensor in head.items()}
    weight, *bias = fitted.values()
    importance = importance.to(weight)
    for rows in order:
        features, labels = anchors.features[rows].to(weight), anchors.labels[rows]
        residual = F.linear(features, weight, *bias).softmax(-1) - F.one_hot(labels, len(weight))
        slope = residual * importance[rows].unsqueeze(-1) / len(rows)  # d risk / d logits
        weight.addmm_(slope.T, features, alpha=-eta)
        for b in bias:
            b.sub_(slope.sum(0), alpha=eta)
    return fitted
