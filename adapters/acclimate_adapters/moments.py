"""Moments of what BatchNorm layers are given: by class at the source, and how far a client's bend the statistics.

The moments of a row (one image) at a layer are, per channel, the mean a and the mean square b of the layer's input over
space. They belong to `balanced`, this project's own method.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from acclimate_adapters.errors import ConfigurationError, InputError, MissingSource
from acclimate_adapters.model import FrozenModel
from acclimate_adapters.priors import source_prior
from acclimate_adapters.probes import Norm

CLASS_MEAN, CLASS_SQUARE, ROW_VARIANCE = "class_mean", "class_square", "row_var"  # as `Source.moments` names them
MEAN = ".running_mean"
TINY = 1e-12  # a variance or squared distance below this is rounding
SMALLEST_RATIO, LARGEST_RATIO = 0.05, 20.0  # of a client's variance to that of the source

Strength = Callable[[slice, Tensor], Tensor | float]  # channels of a layer, deviation [2, c] -> m in 0..1


def row_moments(x: Tensor) -> Tensor:
    """Moments (a, b) of each row, [2, B, C], of the input x [B, C, ...] of a layer; in single precision at least."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    if x.dim() == 2:
        return torch.stack([x, x.square()])
    pixels = x.flatten(2)
    # the norm is the fastest way to a sum of squares along contiguous memory
    return torch.stack([pixels.mean(-1), torch.linalg.vector_norm(pixels, dim=-1).square() / pixels.shape[-1]])


@dataclass(frozen=True, slots=True)
class SourceMoments:
    """The moments of the source at all layers, channels side by side in the order of the network: C altogether.

    Args:
        prior: p_s [K], sum 1.
        spans: channels of each layer; none in a network without BatchNorm.
        by_class: [2, K, C], mean moments mu and s of the rows of each class.
        row_variance: omega [C], variance of a row's a within its class.
    """

    prior: Tensor
    spans: Mapping[str, slice]
    by_class: Tensor
    row_variance: Tensor

    @classmethod
    def of(cls, model: FrozenModel) -> "SourceMoments":
        """Those of a model, on its device, in single precision at least.

        Raises:
            MissingSource: a layer has no moments.
            ConfigurationError: they are not of its width.
        """
        precision = torch.promote_types(model.dtype, torch.float32)
        prior = source_prior(model, torch.empty(0, dtype=precision, device=model.device))
        spans = channel_spans(model)
        kinds = {CLASS_MEAN: (model.classes,), CLASS_SQUARE: (model.classes,), ROW_VARIANCE: ()}
        mean, square, variance = (_side_by_side(model, spans, kind, shape).to(prior) for kind, shape in kinds.items())
        return cls(prior, spans, torch.stack([mean, square]), variance)

    def expected(self, share: Tensor) -> Tensor:
        """Mean moments [2, C] of rows whose classes have these shares [K]."""
        return share @ self.by_class


def channel_spans(model: FrozenModel) -> dict[str, slice]:
    """Where the channels of each BatchNorm layer lie when all are side by side."""
    spans: dict[str, slice] = {}
    start = 0
    for name in model.statistics:
        if name.endswith(MEAN):
            width = len(model.tensor(name))
            spans[name.removesuffix(MEAN)] = slice(start, start + width)
            start += width
    return spans


def _side_by_side(model: FrozenModel, spans: Mapping[str, slice], kind: str, shape: tuple[int, ...]) -> Tensor:
    found = [torch.zeros(*shape, 0)]  # a network without BatchNorm has nothing to join
    for layer, span in spans.items():
        moment, wanted = model.source.moments.get(f"{layer}.{kind}"), [*shape, span.stop - span.start]
        if moment is None:
            raise MissingSource(f"source.moments lacks {layer}.{kind}, of shape {wanted}")
        if [*moment.shape] != wanted:
            raise ConfigurationError(f"source.moments has {layer}.{kind} of shape {[*moment.shape]}, not {wanted}")
        found.append(moment)
    return torch.cat(found, dim=-1)


def shrink(deviation: Tensor, variance: Tensor, row_variance: Tensor, rows: float, factor: float) -> Tensor:
    """James-Stein factor m of a layer: 0 where the deviation is no larger than the noise of so many rows.

    eta = mean of omega / V, lambda = mean of d1^2 / V over channels, m = clip(1 - factor eta / (rows lambda), 0, 1)

    Args:
        deviation: d1 [c], of the mean of a client's rows.
        variance: V [c], positive.
        row_variance: omega [c].
        rows: that the deviation was measured on, > 0.
        factor: 2 in theory; the larger, the closer to 0.
    """
    noise = (row_variance / variance).mean()
    size = (deviation.square() / variance).mean()
    return (1 - factor * noise / (rows * size.clamp_min(TINY))).clamp(0, 1)


def variance_ratio(mean: Tensor, square: Tensor, variance: Tensor) -> Tensor:
    """How much larger the variance with these moments [c] is than V [c], in 0.05..20."""
    return ((square - mean.square() + TINY) / variance).clamp(SMALLEST_RATIO, LARGEST_RATIO)


class Bend:
    """Normalises by running statistics bent towards a client's moments, and notes these.

    Deeper layers see what the bent ones before them make of the batch.

    Args:
        source: moments of the source.
        expected: [2, C], the moments from which those of the client deviate.
        before: [2, C], the client's mean moments before this batch.
        weight: of this batch in the mean after it, in 0..1.
        strength: how far, from 0 to 1, a layer with a given deviation bends.

    Attributes:
        moments: [2, C], the client's mean moments after the batch.
        first: channels of the first layer of the pass, and the batch's mean moments [2, c] there.
        strengths: m [] of each layer, in the order of the pass.
    """

    def __init__(
        self, source: SourceMoments, expected: Tensor, before: Tensor, weight: float, strength: Strength
    ) -> None:
        self.moments = before.clone()
        self.first: tuple[slice, Tensor] | None = None
        self.strengths: list[Tensor] = []
        self._overall = source.expected(source.prior)
        self._variance = overall_variance(self._overall)
        self._source, self._expected, self._weight, self._strength = source, expected, weight, strength

    def __call__(self, norm: Norm, x: Tensor) -> Tensor:
        """Normalise x [B, C, ...]."""
        span = self._source.spans[norm.name]
        batch = row_moments(x).mean(1)
        self.first = self.first or (span, batch)
        ...
        raise NotImplementedError
