"""Which hyper-parameters of an adapter help most, found on labelled clients that tune and do not judge."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise, product
from typing import Any, Final

import numpy as np

from acclimate_adapters import FrozenModel, create, enrols
from acclimate_learning.clients import Client
from acclimate_learning.errors import LearningError
from acclimate_learning.judging import Judgement, judge
from acclimate_store import InputSpec

Options = Mapping[str, Any]
Progress = Callable[[], None]

BLOCKS: Final = 4
"""Parts of a network below its classifier that Surgical may adapt, as in ATP's experiments."""
LRS: Final = (0.01, 0.1, 1.0)
"""Step sizes of Surgical."""
TAUS: Final = (0.3, 1.7)
"""Upper ends of DynFed's rates: the paper's for mixed kinds of shift, and for a single one."""
HEAD_LRS: Final = (0.1, 0.01)
"""Step sizes of the weight of FedTHE's heads: the paper's for convolutions, and for its transformer."""
BETAS: Final = (0.3, 0.1, 1.0)
"""Shares of a sample's own feature in FedTHE's smoothed one: the paper's, its program's, and no history."""
ENROLMENT: Final = 0.4
"""Share of a client's images by which it enrols."""


def _surgical(model: FrozenModel) -> Iterator[Options]:
    for block in blocks(model):
        for lr in LRS:
            yield {"modules": list(block), "lr": lr}


def _dynfed(model: FrozenModel) -> Iterator[Options]:
    yield {"arn": "identity"}
    for tau in TAUS:
        yield {"arn": "mlp", "tau": tau}


def _fedthe(_: FrozenModel) -> Iterator[Options]:
    for lr, beta in product(HEAD_LRS, BETAS):
        yield {"lr": lr, "beta": beta}


GRIDS: Final[Mapping[str, Callable[[FrozenModel], Iterator[Options]]]] = {
    "fedthe": _fedthe, "surgical": _surgical, "dynfed": _dynfed,
}  # fmt: skip


def blocks(model: FrozenModel) -> tuple[tuple[str, ...], ...]:
    """The layers with parameters in at most `BLOCKS` consecutive parts of equally many, and any classifier alone."""
    layers = list(dict.fromkeys(name.rpartition(".")[0] for name in model.parameters))
    below = [layer for layer in layers if layer != model.classifier]
    count = min(BLOCKS, len(below))
    ends = [round(number * len(below) / count) for number in range(count + 1)] if count else [0]
    parts = [tuple(below[a:b]) for a, b in pairwise(ends)]
    return tuple(parts) if model.classifier is None else (*parts, (model.classifier,))


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
        (float(judge_settings(model, spec, tuners, adapter, options, progress).gains.mean()), options)
        for options in GRIDS[adapter](model)
    ]
    return max(found, key=lambda pair: pair[0])[1]


def judge_settings(
    model: FrozenModel,
    spec: InputSpec,
    clients: Sequence[Client],
    adapter: str,
    options: Options,
    progress: Progress = lambda: None,
) -> Judgement:
    """What an adapter with these hyper-parameters does for clients, who enrol if it takes labelled images.

    Those who do are then served what is left of their images, and as much of the next client's: by their own alone,
    whatever trusts the personal head most would be best.
    """
    if not enrols(create(adapter, **options)):
        return judge(model, spec, clients, adapter, options, progress=progress)
    cuts = [max(1, round(ENROLMENT * len(client.labels))) for client in clients]
    enrolment = [_part(client, 0, cut) for client, cut in zip(clients, cuts, strict=True)]
    rests = [_part(client, cut, len(client.labels)) for client, cut in zip(clients, cuts, strict=True)]
    streams = [
        replace(
            own,
            images=np.concatenate([own.images, other.images]),
            labels=np.concatenate([own.labels, other.labels]),
        )
        for own, other in zip(rests, [*rests[1:], rests[0]], strict=True)
    ]
    return judge(model, spec, streams, adapter, options, enrolment=enrolment, progress=progress)


def _part(client: Client, start: int, end: int) -> Client:
    return replace(client, images=client.images[start:end], labels=client.labels[start:end])
