"""Which hyper-parameters of an adapter help most, found on labelled clients that tune and do not judge."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, Final

from acclimate_adapters import FrozenModel
from acclimate_learning.clients import Client
from acclimate_learning.errors import LearningError
from acclimate_learning.judging import judge
from acclimate_store import InputSpec

Options = Mapping[str, Any]
Progress = Callable[[], None]

BLOCKS: Final = 4
"""Parts of a network below its classifier that Surgical may adapt, as in ATP's experiments."""
LRS: Final = (0.01, 0.1, 1.0)
"""Step sizes of Surgical."""
TAUS: Final = (0.3, 1.7)
"""Upper ends of DynFed's rates: the paper's for mixed kinds of shift, and for a single one."""


def _surgical(model: FrozenModel) -> Iterator[Options]:
    for block in blocks(model):
        for lr in LRS:
            yield {"modules": list(block), "lr": lr}


def _dynfed(model: FrozenModel) -> Iterator[Options]:
    yield {"arn": "identity"}
    for tau in TAUS:
        yield {"arn": "mlp", "tau": tau}


GRIDS: Final[Mapping[str, Callable[[FrozenModel], Iterator[Options]]]] = {"surgical": _surgical, "dynfed": _dynfed}


def blocks(model: FrozenModel) -> tuple[tuple[str, ...], ...]:
    """The layers with parameters in at most `BLOCKS` consecutive parts of equally many, and the classifier alone."""
    layers = list(dict.fromkeys(name.rpartition(".")[0] for name in model.parameters))
    below = [layer for layer in layers if layer != model.classifier]
    count = min(BLOCKS, len(below))
    ends = [round(number * len(below) / count) for number in range(count + 1)] if count else [0]
    parts = [tuple(below[a:b]) for a, b in pairwise(ends)]
    return (*parts, (model.classifier,))


def choose_settings(
    model: FrozenModel,
    spec: InputSpec,
    tuners: Sequence[Client],
    adapter: str,
    progress: Progress = lambda: None,
) -> Options:
    """The hyper-parameters with the largest mean gain on some clients; of equals, those that are tried first.

    Raises:
        LearningError: nothing is to be chosen for the adapter.
    """
    if adapter not in GRIDS:
        raise LearningError(f"nothing is to be chosen for {adapter}; there are settings of {', '.join(GRIDS)}")
    found = [
        (float(judge(model, spec, tuners, adapter, options, progress=progress).gains.mean()), options)
        for options in GRIDS[adapter](model)
    ]
    return max(found, key=lambda pair: pair[0])[1]
