"""Moments of what BatchNorm layers are given: by class at the source, and how those of a client bend the statistics.

The moments of a row (one image) at a layer are, per channel, the mean a and the mean square b of the layer's input over
space. They belong to `balanced`, whose equations are numbered in its docstring.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from acclimate_adapters.errors import ConfigurationError, MissingSource
from acclimate_adapters.functional import class_labels, single
from acclimate_adapters.model import FrozenModel
from acclimate_adapters.priors import source_prior
from acclimate_adapters.probes import Norm

MEAN = ".running_mean"
TINY = 1e-12  # keeps variances positive
RATIOS = 0.05, 20.0  # least and greatest of a client's variance to that of the source


def row_moments(x: Tensor) -> Tensor:
    """Moments (a, b) of each row, [2, B, c], of a layer's input x [B, c, ...]; in single precision at least."""
    x = single(x)
    if x.dim() == 2:
        return torch.stack([x, x.square()])
    pixels = x.flatten(2)
    squares = torch.linalg.vector_norm(pixels, dim=-1).square()  # several times faster than squaring, then summing
    return torch.stack([pixels.sum(-1), squares]) / pixels.shape[-1]


class Layer(NamedTuple):
    """What is known of the rows of the source at one BatchNorm layer."""

    overall: Tensor  # M [2, c], mean moments under the prior
    variance: Tensor  # V [c] = M2 - M1^2, positive
    row_variance: Tensor  # omega [c], variance of a row's a within its class


@dataclass(frozen=True, slots=True)
class SourceMoments:
    """The moments of the source at all layers; C channels altogether, in the order of the network.

    Args:
        prior: p_s [K], sum 1.
        widths: channels of each layer; none without BatchNorm.
        by_class: [2, K, C], mu_k and s_k: mean moments of the rows of each class.
        overall: [2, C], their mean under the prior.
        layers: by name.
    """

    prior: Tensor
    widths: Mapping[str, int]
    by_class: Tensor
    overall: Tensor
    layers: Mapping[str, Layer]

    @classmethod
    def of(cls, model: FrozenModel) -> "SourceMoments":
        """Those of a model, on its device, in single precision at least.

        Raises:
            MissingSource: a layer has no moments.
            ConfigurationError: they are of another width than the layer.
        """
        precision = torch.promote_types(model.dtype, torch.float32)
        prior = source_prior(model, torch.empty(0, dtype=precision, device=model.device))
        widths = layer_widths(model)
        mean, square, row_variance = (
            _side_by_side(model, widths, kind, *rows).to(prior)
            for kind, *rows in (("class_mean", model.classes), ("class_square", model.classes), ("row_var",))
        )
        by_class = torch.stack([mean, square])
        overall = prior @ by_class
        variance = (overall[1] - overall[0].square()).clamp_min(0) + TINY
        parts = zip(*(by_layer(t, widths).values() for t in (overall, variance, row_variance)), strict=True)
        layers = {name: Layer(*part) for name, part in zip(widths, parts, strict=True)}
        return cls(prior, widths, by_class, overall, layers)


def layer_widths(model: FrozenModel) -> dict[str, int]:
    """Number of channels of each BatchNorm layer, in the order of the network."""
    return {name.removesuffix(MEAN): len(model.tensor(name)) for name in model.statistics if name.endswith(MEAN)}


def by_layer(side_by_side: Tensor, widths: Mapping[str, int]) -> dict[str, Tensor]:
    """Views of a tensor [..., C] by layer, [..., c]."""
    return dict(zip(widths, torch.split(side_by_side, list(widths.values()), dim=-1), strict=True))


def _side_by_side(model: FrozenModel, widths: Mapping[str, int], kind: str, *rows: int) -> Tensor:
    found = [torch.zeros(*rows, 0)]  # a network without BatchNorm has nothing to join
    for layer, width in widths.items():
        name, wanted = f"{layer}.{kind}", [*rows, width]
        moment = model.source.moments.get(name)
        if moment is None:
            raise MissingSource(f"adapter 'balanced' needs source.moments of every BatchNorm layer; {name} is missing")
        if [*moment.shape] != wanted:
            raise ConfigurationError(
                f"source.moments has {name} of shape {[*moment.shape]}, the network needs {wanted}"
            )
        found.append(moment)
    return torch.cat(found[1:] or found, dim=-1)


class Bend:
    """Normalises by running statistics bent towards a client's moments, of which it takes note.

    Deeper layers thus see a batch that the layers before them have adapted.

    Args:
        source: moments of the source.
        expected: [2, C], the moments from which those of the client deviate.
        before: [2, C], those of the client before this batch.
        weight: of this batch among all rows, in 0..1.
        strength: m [] of a layer, in 0..1, given its deviation d1 [c].

    Attributes:
        batch: moments [2, c] of the batch by layer, in the order in which they ran.
        strengths: m of each of them.
    """

    def __init__(
        self,
        source: SourceMoments,
        expected: Tensor,
        before: Tensor,
        weight: float,
        strength: Callable[[Layer, Tensor], Tensor],
    ) -> None:
        self.batch: dict[str, Tensor] = {}
        self.strengths: list[Tensor] = []
        self._source, self._before, self._weight, self._strength = source, before, weight, strength
        self._deviation = by_layer(before * (1 - weight) - expected, source.widths)  # without the batch

    def __call__(self, norm: Norm, x: Tensor) -> Tensor:
        """Normalise x [B, c, ...]."""
        layer, batch = self._source.layers[norm.name], row_moments(x).mean(1)
        d = torch.add(self._deviation[norm.name], batch, alpha=self._weight)
        m = self._strength(layer, d[0])
        self.batch[norm.name] = batch
        self.strengths.append(m)
        bent = bend(norm.running_mean, norm.running_var, layer, d, m)
        return norm.by_statistics(x, *(statistic.to(norm.running_mean) for statistic in bent))

    def moments(self) -> Tensor:
        """Those of the client [2, C] with the batch; a layer that did not run keeps its own."""
        before = by_layer(self._before, self._source.widths)
        batch = [self.batch.get(name, kept) for name, kept in before.items()]
        return torch.lerp(self._before, torch.cat(batch, dim=-1), self._weight) if batch else self._before


def bend(mean: Tensor, variance: Tensor, layer: Layer, d: Tensor, m: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance [c] of a layer, bent by the deviation of a client (1) and (2).

    By differences and ratios, because the running statistics differ a little from the moments of the source.

    Args:
        mean, variance: running statistics [c].
        layer: the source there.
        d: d1 and d2 [2, c].
        m: [], in 0..1.
    """
    mean, variance = single(mean), single(variance)
    first, second = layer.overall + d
    rho = ((second - first.square() + TINY) / layer.variance).clamp(*RATIOS)
    return torch.addcmul(mean, m, d[0]), torch.lerp(variance, variance * rho, m)


def shrink(layer: Layer, d1: Tensor, rows: float, factor: float) -> Tensor:
    """James-Stein factor m [] of a layer's deviation, 0 where it is no larger than noise (4).

    Args:
        layer: the source there.
        d1: [c], deviation of the mean of a client's rows.
        rows: how many rows were averaged, > 0.
        factor: `shrinkage`.
    """
    weights = 1 / (layer.variance * len(d1))
    eta, size = layer.row_variance @ weights, d1.square() @ weights
    return (1 - factor * eta / (rows * size.clamp_min(TINY))).clamp(0, 1)


class MomentSums(NamedTuple):
    """Sums over labelled rows. Those of disjoint sets of rows add up, so a federation can add those of its clients."""

    rows: Tensor  # [K], how many of each class
    layers: Mapping[str, Tensor]  # by BatchNorm layer: [3, K, c], sums of a, b and a^2 by class and channel


def moment_sums(model: FrozenModel, batches: Iterable[tuple[Tensor, Tensor]]) -> MomentSums:
    """Sum the moments of labelled rows under the frozen model; nothing about a single row is kept.

    Args:
        model: the frozen model; its source needs no moments.
        batches: inputs [B, C, H, W], normalised, and labels [B], int64 in 0..K-1.

    Returns:
        Sums in double precision, on the model's device.

    Raises:
        InputError: a batch cannot be used, or its labels do not fit it.
    """
    rows = torch.zeros(model.classes, dtype=torch.float64, device=model.device)
    layers = {layer: rows.new_zeros(3, model.classes, width) for layer, width in layer_widths(model).items()}
    for inputs, labels in batches:
        x = model.batch(inputs)
        membership = F.one_hot(class_labels(labels, len(x), model.classes), model.classes).T.to(rows)  # [K, B]
        recorder = _Recorder()
        with torch.no_grad():
            model.run(x, normalise=recorder)
        rows += membership.sum(1)
        for layer, (a, b) in recorder.rows.items():
            layers[layer] += membership @ torch.stack([a, b, a.square()])
    return MomentSums(rows, layers)


def moments_from_sums(sums: MomentSums, prior: Tensor) -> dict[str, Tensor]:
    """The tensors of `Source.moments`.

    Args:
        sums: of rows of every class.
        prior: p_s [K], which weights the classes in the variance.

    Returns:
        By `<layer>.class_mean` and `<layer>.class_square` [K, c] and `<layer>.row_var` [c]; single precision.

    Raises:
        ConfigurationError: a class has no row.
    """
    absent = (sums.rows == 0).nonzero().flatten().tolist()
    if absent:
        raise ConfigurationError(f"class moments need rows of every class; there are none of class {absent}")
    share = prior.to(sums.rows) / prior.sum()
    moments: dict[str, Tensor] = {}
    for layer, by_class in sums.layers.items():
        mean, square, mean_of_squares = by_class / sums.rows.unsqueeze(-1)
        moments[f"{layer}.class_mean"], moments[f"{layer}.class_square"] = mean, square
        moments[f"{layer}.row_var"] = share @ (mean_of_squares - mean.square()).clamp_min(0)
    return {name: moment.float() for name, moment in moments.items()}


def source_moments(model: FrozenModel, batches: Iterable[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    """The tensors of `Source.moments` from labelled source rows; as `moment_sums` and `moments_from_sums`."""
    return moments_from_sums(moment_sums(model, batches), model.source.prior)


class _Recorder:
    """Normalises by the running statistics and notes the moments [2, B, c] of each row, in double precision."""

    def __init__(self) -> None:
        self.rows: dict[str, Tensor] = {}

    def __call__(self, norm: Norm, x: Tensor) -> Tensor:
        self.rows[norm.name] = row_moments(x).double()
        return norm.by_statistics(x, norm.running_mean, norm.running_var)
