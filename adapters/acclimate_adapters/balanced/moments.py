"""Moments of what BatchNorm layers are given, by class at the source, and how they are measured.

The moments of a row (one image) at a layer are, per channel, the mean a and the mean square b of the layer's input over
space. They belong to `balanced`, whose equations are numbered in its docstring.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from acclimate_adapters.errors import ConfigurationError, MissingSource
from acclimate_adapters.functional import Numbers, at_least_float32, class_labels, numbers
from acclimate_adapters.methods.priors import source_prior
from acclimate_adapters.network.model import FrozenModel, Pass
from acclimate_adapters.network.probes import STATISTICS, Norm

MEAN = ".running_mean"
TINY = 1e-12  # keeps variances positive
FEW = 8  # pixels next to each other: torch's reductions take longer over them than a product of matrices
RATIOS = 0.05, 20.0  # least and greatest of a client's variance to that of the source


def row_sums(x: Tensor) -> tuple[Tensor, Tensor, int]:
    """Sums over space of each row of a layer's input x [B, c, ...] and of its squares, and over how many pixels.

    Both [B, c], in single precision at least.
    """
    x = at_least_float32(x)
    pixels = x[0, 0].numel()
    if pixels == 1:
        rows = x.flatten(1)
        return rows, rows * rows, 1
    if pixels > FEW or not x.is_contiguous():
        return x.sum(tuple(range(2, x.dim()))), _sums_of_squares(x), pixels
    ones = x.new_ones(pixels, 1)
    a, b = ((side.reshape(-1, pixels) @ ones).view(x.shape[:2]) for side in (x, x * x))
    return a, b, pixels


def _sums_of_squares(x: Tensor) -> Tensor:
    """Sums over space [B, c].

    In a graph line by line: there the squares of all pixels would be written to memory and pass from core to core, and
    a single sum over all of them would round worse.
    """
    if not torch.compiler.is_exporting():
        return (x * x).sum(tuple(range(2, x.dim())))
    norms: Tensor = torch.linalg.vector_norm(x, dim=-1)
    return (norms * norms).reshape(*x.shape[:2], -1).sum(-1)


def row_moments(x: Tensor) -> Tensor:
    """Moments (a, b) of each row, [2, B, c], of a layer's input x [B, c, ...]; in single precision at least."""
    a, b, pixels = row_sums(x)
    return torch.stack([a, b]) / pixels


class Layer(NamedTuple):
    """A BatchNorm layer, and what is known of the rows of the source there; all [c]."""

    running_mean: Tensor
    running_var: Tensor
    least: Tensor  # that a client's variance may differ from running_var
    greatest: Tensor  # that it may
    ratio: Tensor  # running_var / V
    mean: Tensor  # M1, mean of a under the prior
    precision: Tensor  # 1 / (c V), so that its product with squares is their mean relative to V = M2 - M1^2


@dataclass(frozen=True, slots=True)
class SourceMoments:
    """The moments of the source at all layers; C channels altogether, in the order of the network.

    Args:
        prior: p_s [K], sum 1.
        shares: the same on the host.
        widths: channels of each layer; none without BatchNorm.
        by_class: [2, K, C], mu_k and s_k: mean moments of the rows of each class.
        overall: M1 and M2 [2, C], their mean under the prior.
        units: [2, C], standard deviation and variance V of all values of a channel; above 0.
        row_variance: omega [C], variance of a row's a within its class.
        eta: [L], mean of omega / V over the channels of each layer.
        layers: by name.
    """

    prior: Tensor
    shares: Numbers
    widths: Mapping[str, int]
    by_class: Tensor
    overall: Tensor
    units: Tensor
    row_variance: Tensor
    eta: Tensor
    layers: Mapping[str, Layer]

    @classmethod
    def of(cls, model: FrozenModel) -> "SourceMoments":
        """Those of a model, on its device, in single precision at least.

        Raises:
            MissingSource: a layer has no moments.
            ConfigurationError: they are of another width than the layer.
        """
        dtype = torch.promote_types(model.dtype, torch.float32)
        prior = source_prior(model, torch.empty(0, dtype=dtype, device=model.device))
        widths = layer_widths(model)
        mean, square, row_variance = (
            _side_by_side(model, widths, kind, *rows).to(prior)
            for kind, *rows in (("class_mean", model.classes), ("class_square", model.classes), ("row_var",))
        )
        by_class = torch.stack([mean, square])
        overall = prior @ by_class
        variance = (overall[1] - overall[0].square()).clamp_min(0) + TINY
        channels = torch.tensor([*widths.values()], dtype=torch.int64, device=model.device)
        precision = 1 / (channels.repeat_interleave(channels) * variance)
        noise = by_layer(row_variance * precision, widths)
        eta = torch.stack([part.sum() for part in noise.values()]) if noise else prior.new_zeros(0)
        layers = _layers(model, widths, overall[0], variance, precision)
        units = torch.stack([variance.sqrt(), variance])
        return cls(prior, numbers(prior), widths, by_class, overall, units, row_variance, eta, layers)

    def deviations(self, moments: Tensor) -> Tensor:
        """How moments [2, C] of a client deviate from those of the source, in units of its standard deviations.

        Those are (mean a - M1) / sqrt(V) and the mean square about M1 divided by V, less 1: numbers of the order of 1
        whose errors do the same harm in every channel, and means over rows as the moments are.
        """
        d1, d2 = moments - self.overall
        return torch.stack([d1, d2 - 2 * self.overall[0] * d1]) / self.units

    def moments(self, deviations: Tensor) -> Tensor:
        """The inverse of `deviations`."""
        d1, about = deviations * self.units
        return self.overall + torch.stack([d1, about + 2 * self.overall[0] * d1])

    def columns(self, layer: str) -> slice:
        """Where the channels of a layer are among those of all."""
        names = [*self.widths]
        start = sum(self.widths[name] for name in names[: names.index(layer)])
        return slice(start, start + self.widths[layer])


def layer_widths(model: FrozenModel) -> dict[str, int]:
    """Number of channels of each BatchNorm layer, in the order of the network."""
    return {name.removesuffix(MEAN): len(model.tensor(name)) for name in model.statistics if name.endswith(MEAN)}


def by_layer(side_by_side: Tensor, widths: Mapping[str, int]) -> dict[str, Tensor]:
    """Views of a tensor [..., C] by layer, [..., c]."""
    return dict(zip(widths, torch.split(side_by_side, list(widths.values()), dim=-1), strict=True))


def _layers(
    model: FrozenModel, widths: Mapping[str, int], mean: Tensor, variance: Tensor, precision: Tensor
) -> dict[str, Layer]:
    """The layers from columns [C]: one operation for all of them instead of one for each."""
    if not widths:
        return {}
    running_mean, running_var = (
        torch.cat([model.tensor(f"{name}.{kind}") for name in widths]).to(mean) for kind in STATISTICS
    )
    bounds = ((factor - 1) * running_var for factor in RATIOS)
    columns = running_mean, running_var, *bounds, running_var / variance, mean, precision
    by_column = [by_layer(column, widths) for column in columns]
    return {name: Layer._make(column[name] for column in by_column) for name in widths}


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
    counter = MomentCounter(model)
    for inputs, labels in batches:
        counter.add(inputs, labels)
    return counter.sums


class MomentCounter:
    """Sums the moments of labelled rows, batch by batch, in the pass that also answers them.

    Args:
        model: the frozen model; its source needs no moments.

    Attributes:
        sums: of the rows so far, in double precision, on the model's device.
    """

    def __init__(self, model: FrozenModel) -> None:
        self._model = model
        rows = torch.zeros(model.classes, dtype=torch.float64, device=model.device)
        layers = {layer: rows.new_zeros(3, model.classes, width) for layer, width in layer_widths(model).items()}
        self.sums = MomentSums(rows, layers)

    def add(self, inputs: Tensor, labels: Tensor) -> Pass:
        """Add rows and give the frozen pass over them.

        Args:
            inputs: [B, C, H, W], normalised.
            labels: [B], int64 in 0..K-1.

        Raises:
            InputError: the batch cannot be used, or its labels do not fit it.
        """
        x, classes = self._model.batch(inputs), self._model.classes
        membership = F.one_hot(class_labels(labels, len(x), classes), classes).T.to(self.sums.rows)  # [K, B]
        recorder = _Recorder()
        with torch.no_grad():
            answer = self._model.run(x, normalise=recorder)
        self.sums.rows.add_(membership.sum(1))
        for layer, (a, b) in recorder.rows.items():
            self.sums.layers[layer].add_(membership @ torch.stack([a, b, a.square()]))
        return answer


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
