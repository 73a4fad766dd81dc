"""The forward passes of `balanced`: BatchNorm layers normalise by statistics bent towards the clients in the batch.

Rows of several clients go through the network together, since in evaluation mode BatchNorm is a scale and a shift per
channel, which each row may have of its own. Equations are numbered in the docstring of `Balanced`. `consensus` takes
the pass of BN-Adapt over the same rows, which blends those statistics instead: `Blend`.

These few operations per layer run between the layers of a network that itself may take no more than milliseconds, so
they are written to be few: what the layers have in common is computed for all of them before the pass.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import NamedTuple, Protocol, TypeAlias, TypeVar

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from acclimate_adapters.balanced.moments import TINY, Layer, SourceMoments, by_layer, row_sums
from acclimate_adapters.balanced.stem import Stem
from acclimate_adapters.errors import InputError
from acclimate_adapters.functional import Numbers, log_softmax, numbers
from acclimate_adapters.network.model import FrozenModel, require_finite
from acclimate_adapters.network.probes import Norm

T = TypeVar("T")


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
        clients, sizes = np.arange(len(batches)), np.array([len(x) for x in batches])
        client = clients.repeat(sizes)
        share = np.equal.outer(clients, client) / sizes[:, None]
        x = torch.cat(list(batches)) if len(batches) > 1 else batches[0]
        return cls(x, torch.from_numpy(client).to(like.device), torch.from_numpy(share).to(like))


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
    log_p: Numbers  # [B, K]
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
        logits = numbers(self.logits)
        if not np.isfinite(logits).all():
            require_finite(self.logits)  # raises
        log_p, answers, end = log_softmax(logits), [], 0
        for k, x in enumerate(batches):
            rows, end = slice(end, end + len(x)), end + len(x)
            answer = Answer(
                logits=self.logits[rows],
                log_p=log_p[rows],
                features=self.features[rows],
                moments=self.moments[:, k],
                first=self.first[k],
                strengths=self.strengths[:, k],
                layers=self.layers,
            )
            answers.append(answer)
        return answers


class StemOutput(NamedTuple):
    """What comes out of the stem, which all passes over some rows share: the input of the first BatchNorm layer."""

    x: Tensor  # [R, c, ...]
    a: Tensor  # [R, c], its `row_sums`
    b: Tensor  # [R, c]

    @classmethod
    def of(cls, x: Tensor) -> "StemOutput":
        """With the sums of x."""
        a, b, _ = row_sums(x)
        return cls(x, a, b)


class Blending(NamedTuple):
    """What the pass of BN-Adapt must know of G clients."""

    size: Tensor  # [G], rows of the batch
    weight: Tensor  # [G], of its statistics against those of training, in 0..1

    @classmethod
    def of(cls, batches: Iterable[Tensor], prior_strength: float, like: Tensor) -> "Blending":
        """Of one batch [B, C, H, W] each, whose training statistics count for so many rows."""
        size = like.new_tensor([len(x) for x in batches])
        return cls(size, size / (size + prior_strength))


class Run(Protocol):
    """Passes, without gradient, over rows that are already known; what precedes the first BatchNorm layer is shared."""

    def __call__(self, terms: Terms) -> Passed:
        """One pass with bent statistics."""
        ...

    def blended(self, blending: Blending) -> Tensor:
        """Logits [R, K] of the pass of BN-Adapt."""
        ...


AtFirstLayer: TypeAlias = Callable[[Tensor], StemOutput]
"""Is shown the input of the first BatchNorm layer, where statistics begin to matter, and gives what the layer takes."""


class Passes(Protocol):
    """How the network is run."""

    def __call__(self, rows: Rows) -> Run:
        """Get ready for passes over these rows, which share what comes before the first BatchNorm layer."""
        ...


class TorchPasses:
    """Runs the frozen model."""

    def __init__(self, model: FrozenModel, source: SourceMoments) -> None:
        self._model, self._source = model, source

    def __call__(self, rows: Rows) -> Run:
        """As `Passes`."""
        return TorchRun(self._model, self._source, rows)


class TorchRun:
    """Passes of the frozen model over some rows; each raises InputError as `FrozenModel.run`."""

    def __init__(self, model: FrozenModel, source: SourceMoments, rows: Rows) -> None:
        self._model, self._source, self._rows, self._stem = model, source, rows, Stem()

    def __call__(self, terms: Terms) -> Passed:
        """As `Run`."""
        return self._sharing(partial(bent_pass, self._model, self._source, self._rows, terms))

    def blended(self, blending: Blending) -> Tensor:
        """As `Run.blended`."""
        return self._sharing(partial(blended_pass, self._model, self._rows, blending))

    def _sharing(self, run: Callable[[AtFirstLayer], T]) -> T:
        with ExitStack() as stack, torch.no_grad():
            stack.enter_context(self._stem)

            def end_stem(x: Tensor) -> StemOutput:
                output = StemOutput.of(x)
                stack.close()
                return output

            return run(end_stem)


def bent_pass(
    model: FrozenModel, source: SourceMoments, rows: Rows, terms: Terms, at_first_layer: AtFirstLayer
) -> Passed:
    """One pass of the frozen model with bent statistics."""
    bend = Bend(source, rows, terms, at_first_layer)
    answer = model.run(rows.x, normalise=bend)
    ran = bend.strengths
    strengths = torch.cat([*ran.values()], dim=-1).T if ran else terms.most.new_zeros(0, terms.most.shape[0])
    return Passed(answer.logits, answer.features, bend.moments(), bend.first, strengths, tuple(ran))


def blended_pass(model: FrozenModel, rows: Rows, blending: Blending, at_first_layer: AtFirstLayer) -> Tensor:
    """Logits [R, K] of one pass of the frozen model with blended statistics."""
    return model.run(rows.x, normalise=Blend(rows, blending, at_first_layer)).logits


class Bend:
    """Normalises by running statistics bent towards the moments of each client, of which it takes note.

    Deeper layers thus see a batch that the layers before them have adapted.

    Attributes:
        strengths: m [G, 1] by layer, in the order in which they ran.
        first: mean a [G, c] of the batch at the first of them.
    """

    def __init__(self, source: SourceMoments, rows: Rows, terms: Terms, at_first_layer: AtFirstLayer) -> None:
        self.strengths: dict[str, Tensor] = {}
        self.first = terms.most.new_zeros(terms.most.shape[0], 0)
        self._source, self._rows, self._terms, self._at_first_layer = source, rows, terms, at_first_layer
        weight, self._most = terms.weight.unsqueeze(-1), terms.most.unsqueeze(-1)
        self._share = rows.share * weight
        without_batch = terms.before * (1 - weight) - terms.expected
        first, second = (by_layer(side, source.widths) for side in without_batch.unbind())
        self._without_batch = {name: (first[name], second[name]) for name in source.widths}
        self._deviations: dict[str, tuple[Tensor, Tensor]] = {}  # d1 and d2 [G, c] by layer
        self._noises: dict[str, Tensor] = {}
        if terms.noise is not None:
            noises = torch.outer(terms.most * terms.noise, source.eta)
            self._noises = dict(zip(source.widths, torch.split(noises, 1, dim=-1), strict=True))

    def __call__(self, norm: Norm, x: Tensor) -> Tensor:
        """Normalise x [R, c, ...]."""
        layer = self._source.layers[norm.name]
        if self.strengths:
            a, b, pixels = row_sums(x)
        else:
            x, a, b = self._at_first_layer(x)
            pixels = x[0, 0].numel()
            self.first = self._rows.share @ a / pixels
        without_a, without_b = self._without_batch[norm.name]
        d1 = torch.addmm(without_a, self._share, a, alpha=1 / pixels)
        d2 = torch.addmm(without_b, self._share, b, alpha=1 / pixels)
        noise = self._noises.get(norm.name)
        m = self._most if noise is None else shrink(layer, d1, self._most, noise)
        self._deviations[norm.name], self.strengths[norm.name] = (d1, d2), m
        mean, variance = bend(layer, d1, d2, m)
        return rescale(norm, x, self._rows, mean, variance)

    def moments(self) -> Tensor:
        """Those of each client [2, G, C] with the batch; those before it for a layer that did not run."""
        if not self._deviations:
            return self._terms.before
        kept = by_layer(self._terms.before - self._terms.expected, self._source.widths)
        sides = zip(*(self._deviations.get(name, both) for name, both in kept.items()), strict=True)
        return torch.stack([torch.cat(side, dim=-1) for side in sides]) + self._terms.expected


class Blend:
    """Normalises by running statistics blended with those of each client's batch, as `bn_adapt` does for one client."""

    def __init__(self, rows: Rows, blending: Blending, at_first_layer: AtFirstLayer) -> None:
        self._rows, self._at_first_layer, self._first = rows, at_first_layer, True
        self._size, self._weight = (each.unsqueeze(-1) for each in blending)

    def __call__(self, norm: Norm, x: Tensor) -> Tensor:
        """Normalise x [R, c, ...]; a client with one value per channel, whose variance is undefined, as at training."""
        if self._first:
            (x, a, b), self._first = self._at_first_layer(x), False
            pixels = x[0, 0].numel()
        else:
            a, b, pixels = row_sums(x)
        mean, square = (self._rows.share @ side / pixels for side in (a, b))
        values = self._size * pixels  # per channel
        variance = (square - mean * mean).relu() * (values / (values - 1).clamp_min(1))  # unbiased
        weight = self._weight * (values > 1)
        running_mean, running_var = norm.running_mean.to(mean), norm.running_var.to(mean)
        blended = (
            running + weight * (batch - running) for running, batch in ((running_mean, mean), (running_var, variance))
        )
        return rescale(norm, x, self._rows, *blended)


def shrink(layer: Layer, d1: Tensor, most: Tensor, noise: Tensor) -> Tensor:
    """James-Stein factor m [G, 1] of a layer, in 0..`most`: 0 when the deviation is no larger than noise (4).

    Args:
        layer: the source there.
        d1: [G, c].
        most: [G, 1], what a deviation without noise gets.
        noise: [G, 1], `most` times `shrinkage` eta / n.
    """
    size = (d1 * d1) @ layer.precision.unsqueeze(-1)  # lambda
    return (most - noise / (size + TINY)).relu()


def bend(layer: Layer, d1: Tensor, d2: Tensor, m: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance [G, c] of a layer, bent by the deviations of each client (1) and (2).

    By differences, because the running statistics differ a little from the moments of the source: rho - 1 is
    (d2 - d1 (d1 + 2 M1)) / V.

    Args:
        layer: the source there.
        d1, d2: [G, c].
        m: [G, 1], in 0..1.
    """
    change = layer.ratio * (d2 - d1 * torch.add(d1, layer.mean, alpha=2))
    bounded = torch.clamp(change, layer.least, layer.greatest)
    return layer.running_mean + m * d1, layer.running_var + m * bounded


def rescale(norm: Norm, x: Tensor, rows: Rows, mean: Tensor, variance: Tensor) -> Tensor:
    """Normalise x [R, c, ...] by the mean and the variance [G, c] of each row's client.

    Those of several clients by the very same operation, to which channels of rows are so many channels of one.
    """
    mean, variance = mean.to(norm.running_mean), variance.to(norm.running_var)
    if mean.shape[0] == 1:
        return norm.by_statistics(x, mean[0], variance[0])
    mean, variance = (statistic.index_select(0, rows.client).reshape(-1) for statistic in (mean, variance))
    ones = x.new_ones(x.shape[0], 1)
    weight, bias = (None if each is None else (ones * each).reshape(-1) for each in (norm.weight, norm.bias))
    channels = x.reshape(1, -1, *x.shape[2:])
    rescaled = F.batch_norm(channels, mean, variance, weight, bias, False, 0.0, norm.eps).reshape(x.shape)
    # in a graph, what writes to a view in place leads to one more view of what was written
    return rescaled.clone() if torch.compiler.is_exporting() else rescaled
