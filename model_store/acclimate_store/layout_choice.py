"""In which memory layout the passes of a model are fastest, found by trying them."""

import time
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, TypeAlias

import torch
from torch import Tensor

from acclimate_adapters import FrozenModel
from acclimate_adapters.network.direction import direction
from acclimate_adapters.network.graphs import PATIENCE
from acclimate_store.bundle import PLAIN
from acclimate_store.runtimes import TOLERANCE

Work: TypeAlias = Callable[[FrozenModel, Tensor], Tensor]

ROWS: Final = 8
ROUNDS: Final = 5
LONGEST_S: Final = 1.0
"""After so much time for one kind of passes no further round is begun."""
GAIN: Final = 0.95
"""Share of the plain time that is worth a change; what is no faster stays as it is, on every replica."""
_NAMES: Final = {
    (False, False): PLAIN,
    (True, False): "channels_last in frozen passes",
    (False, True): "channels_last in adapted passes",
    (True, True): "channels_last",
}


class LaidOut(NamedTuple):
    """A model with the layouts that suit it, and their name."""

    model: FrozenModel
    layout: str


def fastest(model: FrozenModel, shape: Sequence[int]) -> LaidOut:
    """The model in the layouts that are fastest on its device, with as many threads as torch has in the calling one.

    Networks that cannot take one, or answer otherwise in it, do without.

    Args:
        model: frozen.
        shape: C, H and W of its input.
    """
    x = torch.randn(ROWS, *shape, generator=torch.Generator().manual_seed(0)).to(model.device, model.dtype)
    frozen = _pays(model, model.with_layouts(frozen=True, adapted=False), x, _frozen)
    adapted = _pays(model, model.with_layouts(frozen=False, adapted=True), x, _adapted)
    return LaidOut(model.with_layouts(frozen=frozen, adapted=adapted), _NAMES[frozen, adapted])


def _frozen(model: FrozenModel, x: Tensor) -> Tensor:
    return model.forward(x, {}).cpu()


def _adapted(model: FrozenModel, x: Tensor) -> Tensor:
    """Forward, backward and forward, as most methods with gradients need them."""
    direction(model, x)
    return model.forward(x, {name: model.tensor(name) for name in model.parameters}).cpu()


def _pays(plain: FrozenModel, other: FrozenModel, x: Tensor, work: Work) -> bool:
    warm_up = PATIENCE + 1 if plain.graphs.active else 1  # until both replay their graphs
    try:
        expected, found = ([work(model, x) for _ in range(warm_up)][-1] for model in (plain, other))
    except Exception:  # foreign layers may raise anything
        return False
    if not float((found - expected).abs().max()) <= TOLERANCE * float(expected.abs().max()):
        return False
    return _least_time(other, plain, x, work) < GAIN


def _least_time(other: FrozenModel, plain: FrozenModel, x: Tensor, work: Work) -> float:
    """The least time of one model over that of the other, measured in turn."""
    times: dict[bool, list[float]] = {True: [], False: []}
    end = time.monotonic() + LONGEST_S
    for _ in range(ROUNDS):
        for is_other, model in ((False, plain), (True, other)):
            start = time.perf_counter()
            work(model, x)
            times[is_other].append(time.perf_counter() - start)
        if time.monotonic() > end:
            break
    return min(times[True]) / min(times[False])
