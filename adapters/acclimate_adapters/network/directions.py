"""The update directions of many clients, taken together in one pass."""

from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from acclimate_adapters.errors import InputError
from acclimate_adapters.functional import entropy, single
from acclimate_adapters.network.model import Direction, FrozenModel
from acclimate_adapters.network.probes import STATISTICS, Norm

Tensors: TypeAlias = dict[str, Tensor]


def directions(
    model: FrozenModel, batches: Sequence[Tensor], modules: Iterable[str] | None = None
) -> tuple[Direction, ...]:
    """What `FrozenModel.direction` gives for each batch, from one vectorised pass over all of them.

    Every client's statistics and gradient are its own, up to rounding. The gradients of all clients are in memory at
    once, and that of a convolution becomes a grouped one; whether this is faster depends on the device and has to be
    measured there.

    Args:
        model: the frozen model.
        batches: one or more of one shape [B, C, H, W], each checked by `FrozenModel.batch`.
        modules: names of the modules wanted; all of them when None.

    Raises:
        InputError: the batches differ in shape, or the network cannot take them.
    """
    if len({batch.shape for batch in batches}) != 1:
        raise InputError(f"batches that are run together must be of one shape, not {[[*x.shape] for x in batches]}")
    wanted = model.modules if modules is None else tuple(modules)
    leaves = {name: model.tensor(name) for name in wanted if name in model.parameters}
    statistics = _Statistics(frozenset(wanted) - leaves.keys())

    def loss(leaves: Mapping[str, Tensor], x: Tensor) -> tuple[Tensor, tuple[Tensor, Tensors]]:
        statistics.begin()
        logits = model.run(x, leaves, statistics).logits
        return -entropy(logits).mean(), (logits, statistics.batch)

    def descent(x: Tensor) -> tuple[Tensors, tuple[Tensor, Tensors]]:
        if not leaves:
            return {}, loss({}, x)[1]
        found: tuple[Tensors, tuple[Tensor, Tensors]] = torch.func.grad(loss, has_aux=True)(leaves, x)
        return found

    with torch.inference_mode(False), torch.no_grad():
        tensors, (logits, batch) = torch.func.vmap(descent)(torch.stack(list(batches)))
        counts = _constant(batch, len(batches))
        tensors |= {name: _differences(model.tensor(name), batch.get(name), len(batches)) for name in statistics.wanted}
    undefined = tuple(statistics.undefined)
    return tuple(
        Direction({name: tensors[name][i].clone() for name in wanted}, logits[i], undefined, count)
        for i, count in enumerate(counts)
    )


class _Statistics:
    """Normalises by the running statistics and notes those of the batch, where some of a layer are wanted.

    Unlike `Recorder`, which is fast for one batch, it needs only operations that have a rule for many.
    """

    def __init__(self, wanted: frozenset[str]) -> None:
        self.wanted = wanted
        self.begin()

    def begin(self) -> None:
        """Forget an earlier pass."""
        self.batch: Tensors = {}
        self.undefined: list[str] = []

    def __call__(self, norm: Norm, x: Tensor) -> Tensor:
        """Normalise x [B, C, ...]."""
        mean_name, variance_name = (f"{norm.name}.{kind}" for kind in STATISTICS)
        if not self.wanted.isdisjoint((mean_name, variance_name)):
            values, dims = single(x.detach()), [d for d in range(x.dim()) if d != 1]
            if x.numel() == x.shape[1]:
                self.batch[mean_name] = values.mean(dims)
                self.undefined.append(variance_name)
            else:
                self.batch[variance_name], self.batch[mean_name] = torch.var_mean(values, dims, correction=1)
        return norm.by_statistics(x, norm.running_mean, norm.running_var)


def _differences(running: Tensor, batch: Tensor | None, clients: int) -> Tensor:
    """Batch statistics - running statistic, [G, C]; 0 where they are undefined."""
    if batch is None:
        return torch.zeros_like(running).expand(clients, -1)
    return (batch - running).to(running.dtype)


def _constant(batch: Mapping[str, Tensor], clients: int) -> list[int]:
    """Of each client, the channels whose values are all the same."""
    variances = [tensor for name, tensor in batch.items() if name.endswith(STATISTICS[1])]
    if not variances:
        return [0] * clients
    counts: list[int] = (torch.cat(variances, dim=-1) == 0).sum(-1).tolist()
    return counts
