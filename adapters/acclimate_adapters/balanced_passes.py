"""The forward passes of `balanced`: BatchNorm layers normalise by statistics bent towards the clients in the batch.

Rows of several clients go through the network together, since in evaluation mode BatchNorm is a scale and a shift per
channel, which each row may have of its own. Equations are numbered in the docstring of `Balanced`.

These few operations per layer run between the layers of a network that itself may take no more than milliseconds, so
they are written to be few: what the layers have in common is computed for all of them before the pass.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from acclimate_adapters.errors import InputError
from acclimate_adapters.model import FrozenModel
from acclimate_adapters.moments import TINY, Layer, SourceMoments, by_layer, row_sums
from acclimate_adapters.priors import log_posteriors
from acclimate_adapters.probes import Norm
from acclimate_adapters.stem import Stem


class Rows(NamedTuple):
    """The rows of G clients, one client after the other."""

    x: Tensor  # [R, C, H, W]
    client: Tensor  # [R], int64, whose row it is
    share: Tensor  # [G, R], what the row counts in the mean over the rows of a client

    @classmethod
    def of(cls, batches: Sequence[Tensor], like: Tensor) -> "Rows":
        """Of one batch [B, C, H, W] each, with shares in the precision and on the device of another tensor.

        Raises:
            InputError: the batches cannot be joined.
        """
        if len({x.shape[1:] for x in batches}) > 1:
            raise InputError(f"batches that are run together must be of one shape, not {[[*x.shape] for x in batches]}")
        sizes = torch.tensor([len(x) for x in batches])
        client = torch.arange(len(batches)).repeat_interleave(sizes)
        share = F.one_hot(client, len(batches)).T.to(like.dtype) / sizes.unsqueeze(-1)
        x = torch.cat(list(batches)) if len(batches) > 1 else batches[0]
        return cls(x, client.to(like.device), share.to(like.device))


class Terms(NamedTuple):
    """What a pass must know of G clients."""

    expected: Tensor  # [2, G, C], the moments from which those of the client deviate
    before: Tensor  # [2, G, C], the moments before this batch
    weight: Tensor  # [G], of this batch among all rows, in 0..1
    most: Tensor  # [G], the largest m, in 0..1
    noise: Tensor | None  # [G], `shrinkage` / n, by which m shrinks from layer to layer; None when it does not


class Answer(NamedTuple):
    """What a pass yields for one client."""

    logits: Tensor  # [B, K]
    log_p: Tensor  # [B, K], in single precision at least
    features: Tensor  # [B, d]
    moments: Tensor  # [2, C], with the batch; those before it for a layer that did not run
    first: Tensor  # [c], mean a of the batch at the first layer that ran; empty without layers
    strengths: Tensor  # [L], m of each layer that ran, in the order in which they did
    layers: tuple[str, ...]  # their names


class Passed(NamedTuple):
    """What a pass yields for G clients."""

    logits: Tensor  # [R, K]
    features: Tensor  # [R, d]
    moments: Tensor  # [2, G, C]
    first: Tensor  # [G, c]
    strengths: Tensor  # [L, G]
    layers: tuple[str, ...]

    def split(self, batches: Iterable[Tensor]) -> list[Answer]:
        """The part of each client, whose batch [B, C, H, W] this was.

        Raises:
            NumericalError: a logit is not finite.
        """
        sizes = [len(x) for x in batches]
        by_row = (torch.split(t, sizes) for t in (self.logits, log_posteriors(self.logits), self.features))
        by_client = self.moments.unbind(1), self.first.unbind(0), self.strengths.unbind(1)
        return [Answer._make((*part, self.layers)) for part in zip(*by_row, *by_client, strict=True)]


class Passes(Protocol):
    """How the network is run."""

    def __call__(self, rows: Rows, terms: Terms) -> Passed:
        """One pass, without gradient."""
        ...


class TorchPasses:
    """Runs the frozen model; passes over the same rows share what comes before the first BatchNorm layer."""

    def __init__(self, model: FrozenModel, source: SourceMoments) -> None:
        self._model, self._source, self._stem = model, source, Stem()

    def __call__(self, rows: Rows, terms: Terms) -> Passed:
        """As `Passes`; raises InputError as `FrozenModel.run`."""
        with ExitStack() as stem, torch.no_grad():
            stem.enter_context(self._stem)
            return bent_pass(self._model, self._source, rows, terms, stem.close)


def bent_pass(
    model: FrozenModel, source: SourceMoments, rows: Rows, terms: Terms, at_first_layer: Callable[[], None]
) -> Passed:
    """One pass of the frozen model with bent statistics; `at_first_layer` is called where they begin to matter."""
    bend = Bend(source, rows, terms, at_first_layer)
    answer = model.run(rows.x, normalise=bend)
    ran = bend.strengths
    strengths = torch.stack([*ran.values()]) if ran else terms.most.new_zeros(0, terms.most.shape[0])
    return Passed(answer.logits, answer.features, bend.moments(), bend.first, strengths, tuple(ran))


class Bend:
    """Normalises by running statistics bent towards the moments of each client, of which it takes note.

    Deeper layers thus see a batch that the layers before them have adapted.

    Attributes:
        strengths: m [G] by layer, in the order in which they ran.
        first: mean a [G, c] of the batch at the first of them.
    """

    def __init__(self, source: SourceMoments, rows: Rows, terms: Terms, at_first_layer: Callable[[], None]) -> None:
        self.strengths: dict[str, Tensor] = {}
        self.first = terms.most.new_zeros(terms.most.shape[0], 0)
        self._source, self._rows, self._terms, self._at_first_layer = source, rows, terms, at_first_layer
        weight = terms.weight.unsqueeze(-1)
        self._share = rows.share * weight
        self._unexplained = source.overall.unsqueeze(1) - terms.expected
        without_batch = (self._unexplained + terms.before * (1 - weight)).unbind()
        first, second = (by_layer(side, source.widths).values() for side in without_batch)
        self._without_batch = dict(zip(source.widths, zip(first, second, strict=True), strict=True))
        self._most = terms.most.unsqueeze(-1)
        self._deviated: dict[str, tuple[Tensor, Tensor]] = {}  # M1 + d1 and M2 + d2 by layer
        self._noises: dict[str, Tensor] = {}
        if terms.noise is not None:
            noises = torch.outer(source.eta, terms.most * terms.noise)
            self._noises = dict(zip(source.widths, noises.unbind(), strict=True))

    def __call__(self, norm: Norm, x: Tensor) -> Tensor:
        """Normalise x [R, c, ...]."""
        layer, (a, b, pixels) = self._source.layers[norm.name], row_sums(x)
        if not self.strengths:
            self._at_first_layer()
            self.first = self._rows.share @ a / pixels
        without_a, without_b = self._without_batch[norm.name]
        first = torch.addmm(without_a, self._share, a, alpha=1 / pixels)
        second = torch.addmm(without_b, self._share, b, alpha=1 / pixels)
        deviation, noise, m, column = first - layer.mean, self._noises.get(norm.name), self._terms.most, self._most
        if noise is not None:
            m = shrink(layer, deviation, m, noise)
            column = m.unsqueeze(-1)
        self._deviated[norm.name], self.strengths[norm.name] = (first, second), m
        mean, variance = bend(layer, deviation, first, second, column)
        return rescale(norm, x, self._rows, mean, variance)

    def moments(self) -> Tensor:
        """Those of each client [2, G, C] with the batch; those before it for a layer that did not run."""
        if not self._deviated:
            return self._terms.before
        kept = by_layer(self._terms.before + self._unexplained, self._source.widths)
        both = zip(*(self._deviated.get(name, moments) for name, moments in kept.items()), strict=True)
        return torch.stack([torch.cat(side, dim=-1) for side in both]) - self._unexplained


def shrink(layer: Layer, deviation: Tensor, most: Tensor, noise: Tensor) -> Tensor:
    """James-Stein factor m [G] of a layer, in 0..`most`: 0 when the deviation is no larger than noise (4).

    Args:
        layer: the source there.
        deviation: d1 [G, c].
        most: [G], what a deviation without noise gets.
        noise: [G], `most` times `shrinkage` eta / n.
    """
    size = (deviation * deviation) @ layer.precision  # lambda
    return torch.addcdiv(most, noise, size.clamp_min_(TINY), value=-1).clamp_min_(0)


def bend(layer: Layer, deviation: Tensor, first: Tensor, second: Tensor, m: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance [G, c] of a layer, bent by the deviation of each client (1) and (2).

    By differences and ratios, because the running statistics differ a little from the moments of the source.

    Args:
        layer: the source there.
        deviation: d1 [G, c].
        first, second: M1 + d1 and M2 + d2 [G, c].
        m: [G, 1], in 0..1.
    """
    mean = torch.addcmul(layer.running_mean, deviation, m)
    variance = (first * first).neg_().add_(second).add_(TINY)  # not finite where a square is not
    bounded = torch.clamp(variance.mul_(layer.ratio), layer.least, layer.greatest)  # rho times that of the source
    return mean, torch.lerp(layer.running_var, bounded, m)


def rescale(norm: Norm, x: Tensor, rows: Rows, mean: Tensor, variance: Tensor) -> Tensor:
    """Normalise x [R, c, ...] by the mean and the variance [G, c] of each row's client."""
    if mean.shape[0] == 1:
        return norm.by_statistics(x, mean[0].to(norm.running_mean), variance[0].to(norm.running_var))
    scale = (variance + norm.eps).rsqrt()
    scale = scale if norm.weight is None else scale * norm.weight
    shift = -mean * scale if norm.bias is None else norm.bias - mean * scale
    over_space = x.shape[0], -1, *[1] * (x.dim() - 2)
    scale, shift = (statistic[rows.client].reshape(over_space) for statistic in (scale, shift))
    return (x * scale).add_(shift).to(x.dtype)
