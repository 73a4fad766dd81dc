"""Runs the methods: every client from a fresh state, its images in the order in which it sends them."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from acclimate_adapters import Adapter, FrozenModel, create, missing
from acclimate_bench.accuracy.methods import Method
from acclimate_bench.data.shift import SUBSET, Recorded, Shift
from acclimate_bench.options import Progress

BATCH = 20
Classes = NDArray[np.int64]  # [C, N], predicted
Hits = NDArray[np.bool_]  # [C, N], which answers are right


@dataclass(frozen=True, slots=True)
class Result:
    """How often one method was right on one shift; one entry of `correct`, `frozen` and `reference` for each client."""

    method: str
    adapter: str
    shift: str
    options: Mapping[str, Any]
    enrolled: int  # labelled images of each client that the method was given, and did not answer
    images: int  # answered by each client
    clients: tuple[int, ...]  # their numbers in the full set
    correct: tuple[int, ...]
    frozen: tuple[int, ...]  # right answers of the frozen model on the same images
    reference: tuple[float, ...] | None  # recorded accuracies on the same images, 0..1


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A method that could not be measured on a shift."""

    method: str
    shift: str
    reason: str


class Part(NamedTuple):
    """What a method answers."""

    rows: tuple[int, ...]  # of the clients
    first: int  # image of each client
    last: int  # exclusive

    def of(self, array: NDArray[Any]) -> NDArray[Any]:
        """The part of an array [C, N]."""
        return array[[*self.rows], self.first : self.last]


def count_clients(shift: Shift, methods: Sequence[Method]) -> int:
    """How many clients `measure` will report to its progress."""
    return len(shift.clients) + sum(len(part_of(m, shift).rows) for m in methods if obstacle(m, shift) is None)


def measure(shift: Shift, methods: Sequence[Method], seed: int, progress: Progress) -> Iterator[Result | LeftOut]:
    """Measure methods on one shift, beside the frozen model on the same images.

    Args:
        shift: the data.
        methods: in the order of the results.
        seed: of those methods that draw random numbers.
        progress: called after each client.
    """
    frozen = frozen_classes(shift, progress) == shift.labels
    for method in methods:
        reason = obstacle(method, shift)
        if reason is not None:
            yield LeftOut(method.name, shift.name, reason)
            continue
        part = part_of(method, shift)
        hits = adapted_classes(method, shift, seed, progress) == part.of(shift.labels)
        yield _result(method, method.hyperparameters(shift.hparams, seed), shift, part, hits, part.of(frozen))


def part_of(method: Method, shift: Shift) -> Part:
    """Which images a method answers: all that follow the enrolment, or no more than the recorded subset."""
    rows, length = [*range(len(shift.clients))], shift.labels.shape[1] - method.enrolled
    if method.slow and SUBSET in shift.recorded:
        subset = shift.recorded[SUBSET]
        rows = [row for row in rows if shift.clients[row] in subset.accuracy]
        length = min(length, subset.images)
    return Part(tuple(rows), method.enrolled, method.enrolled + length)


def predict(adapter: Adapter, model: FrozenModel, x: Tensor, /, **enrolment: Tensor) -> Tensor:
    """Predicted classes [N] of one client's images x [N, C, H, W], in batches, from a fresh state."""
    state, predicted = adapter.init(model, **enrolment), []
    for batch in torch.split(x, BATCH):
        step = adapter.step(model, state, batch)
        state = step.state
        predicted.append(step.logits.argmax(dim=1))
    return torch.cat(predicted)


def obstacle(method: Method, shift: Shift) -> str | None:
    """Why a method cannot be measured on a shift; None when it can."""
    if not part_of(method, shift).rows:
        return "none of these clients is in the recorded subset, the only one that slow methods answer"
    try:
        adapter = create(method.adapter, **method.hyperparameters(shift.hparams, seed=0))
    except KeyError as error:
        return f"no hyper-parameters of {error} were recorded"
    lacking = missing(adapter, shift.model)
    return f"it needs {', '.join(lacking)}, which the data of this shift do not hold" if lacking else None


def frozen_classes(shift: Shift, progress: Progress) -> Classes:
    """What the frozen model predicts for all images; `progress` as in `measure`."""
    everything = Part(tuple(range(len(shift.clients))), 0, shift.labels.shape[1])
    return _classes(create("none"), shift, everything, 0, partial(progress, f"{shift.name} frozen"))


def adapted_classes(method: Method, shift: Shift, seed: int, progress: Progress) -> Classes:
    """What a method without obstacle predicts for its part; arguments as in `measure`."""
    adapter = create(method.adapter, **method.hyperparameters(shift.hparams, seed))
    done = partial(progress, f"{shift.name} {method.name}")
    return _classes(adapter, shift, part_of(method, shift), method.enrolled, done)


def _classes(adapter: Adapter, shift: Shift, part: Part, enrolled: int, done: Callable[[], None]) -> Classes:
    classes = []
    for row in part.rows:
        x, labels = shift.x(row), torch.from_numpy(shift.labels[row])
        enrolment = {"x": x[:enrolled], "labels": labels[:enrolled]} if enrolled else {}
        classes.append(predict(adapter, shift.model, x[part.first : part.last], **enrolment).numpy())
        done()
    return np.stack(classes)


def _result(method: Method, options: Mapping[str, Any], shift: Shift, part: Part, hits: Hits, frozen: Hits) -> Result:
    clients = tuple(shift.clients[row] for row in part.rows)
    return Result(
        method=method.name,
        adapter=method.adapter,
        shift=shift.name,
        options=options,
        enrolled=method.enrolled,
        images=part.last - part.first,
        clients=clients,
        correct=tuple(hits.sum(axis=1).tolist()),
        frozen=tuple(frozen.sum(axis=1).tolist()),
        reference=_reference(shift.recorded.get(method.reference or ""), clients),
    )


def _reference(recorded: Recorded | None, clients: Sequence[int]) -> tuple[float, ...] | None:
    return None if recorded is None else tuple(recorded.accuracy[client] for client in clients)
