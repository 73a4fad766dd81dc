"""The update direction h of a batch at the global weights (ATP, Eq. 4 and 5)."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from acclimate_adapters.functional import batch_statistics, entropy, unshared
from acclimate_adapters.network.graphs import Outcome
from acclimate_adapters.network.model import FrozenModel
from acclimate_adapters.network.probes import STATISTICS, Norm


@dataclass(frozen=True, slots=True)
class Direction:
    """The update direction h of one batch at the global weights."""

    tensors: Mapping[str, Tensor]  # module name -> direction, shaped like the module; the caller owns them
    features: Tensor  # [B, d] of that same pass
    logits: Tensor  # [B, K] of that same pass: the prediction of the frozen model
    undefined: tuple[str, ...]  # variances that one value per channel leaves undefined; their direction is 0
    constant: int  # channels whose values were all the same: their variance is 0


def direction(model: FrozenModel, x: Tensor, modules: Iterable[str] | None = None) -> Direction:
    """The update direction of a batch, and the features and logits of that same pass.

    Parameters: h = -gradient of the batch-mean entropy (Eq. 4).
    Running statistics: h = batch statistic - running statistic, with the unbiased variance (Eq. 5).
    Both come from one pass in which every layer normalises by its running statistics. A layer that does not run in it
    has direction 0.
    Autograd stops at the earliest parameter asked for and does not run without one.

    Each size of batch has a graph of its own: rows that fill one up would change statistics and mean gradient.

    Args:
        model: the frozen model.
        x: [B, C, H, W], a batch that `FrozenModel.batch` has checked.
        modules: names of the modules wanted; all of them when None.

    Raises:
        InputError: the network cannot take the batch.

    Reference: Bao, Wei, Wang, He: "Adaptive Test-Time Personalization for Federated Learning", NeurIPS 2023.
    """
    wanted = model.modules if modules is None else tuple(modules)
    outcome = model.graphs.call(("direction", wanted), lambda arguments: _direction(model, arguments[0], wanted), (x,))
    (*tensors, features, logits, constant), undefined = outcome
    return Direction(dict(zip(wanted, tensors, strict=True)), features, logits, undefined, int(constant))


def _direction(model: FrozenModel, x: Tensor, wanted: tuple[str, ...]) -> Outcome:
    leaves = {name: model.tensor(name).detach().requires_grad_() for name in wanted if name in model.parameters}
    recorder = Recorder(frozenset(wanted) - leaves.keys())
    with torch.inference_mode(False), torch.set_grad_enabled(bool(leaves)):
        answer = model.run(x, leaves, recorder if recorder.wanted else None)
        tensors = recorder.directions() | _descent(answer.logits, leaves)
    features, logits = answer.features.detach(), answer.logits.detach()
    constant = recorder.constant()
    constants = logits.new_zeros(()) if constant is None else constant
    # a layer that only training runs, as the auxiliary heads of GoogLeNet and Inception have, saw no batch
    directions = (tensors[name] if name in tensors else torch.zeros_like(model.tensor(name)) for name in wanted)
    return Outcome((*directions, features, logits, constants), tuple(recorder.undefined))


def _descent(logits: Tensor, leaves: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Negative gradient of the mean entropy: the gradient of its negative, which saves a pass over the weights.

    Each in memory of its own: autograd gives one and the same tensor for two parameters of which only the sum is used.
    """
    if not leaves:
        return {}
    gradients = torch.autograd.grad(-entropy(logits).mean(), list(leaves.values()), materialize_grads=True)
    return dict(zip(leaves, unshared(gradients), strict=True))


class Recorder:
    """Normalises by the running statistics and notes how the batch differs from them.

    Args:
        wanted: names of the running statistics to compare with.

    Attributes:
        undefined: names of the variances that one value per channel leaves undefined; their direction is 0.
    """

    def __init__(self, wanted: frozenset[str]) -> None:
        self.wanted = wanted
        self.undefined: list[str] = []
        self._names: list[str] = []
        self._batch: list[Tensor] = []
        self._running: list[Tensor] = []
        self._variances: list[Tensor] = []

    def __call__(self, norm: Norm, x: Tensor) -> Tensor:
        """Normalise x [B, C, ...]."""
        names = tuple(f"{norm.name}.{kind}" for kind in STATISTICS)
        if not self.wanted.isdisjoint(names):
            mean, variance = batch_statistics(x.detach())
            if variance is None:
                self.undefined.append(names[1])
                variance = norm.running_var.to(mean)
            else:
                self._variances.append(variance)
            self._names += names
            self._batch += mean, variance
            self._running += norm.running_mean, norm.running_var
        return norm.by_statistics(x, norm.running_mean, norm.running_var)

    def directions(self) -> dict[str, Tensor]:
        """Batch statistic - running statistic by name, for each layer of which one was wanted; float32 at least."""
        if not self._names:
            return {}
        differences = torch._foreach_sub(self._batch, self._running)  # of all layers at once: they are small and many
        return dict(zip(self._names, differences, strict=True))

    def constant(self) -> Tensor | None:
        """The number [] of channels whose values are all the same in this batch; None without a variance."""
        return (torch.cat(self._variances) == 0).sum() if self._variances else None
