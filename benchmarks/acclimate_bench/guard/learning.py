"""What methods gain by learning from the labels that the guard counts.

As in the replays of the guard, each row is labelled with the same chance once its batch is answered; here these labels
are taken into the state before the client's next batch. The answers are the adapted ones, whatever a guard would say.
"""

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from acclimate_adapters import ADAPTERS, Adapter, FrozenModel, Labelled, create, learns
from acclimate_bench.accuracy.measure import BATCH, Hits, LeftOut, frozen_classes, obstacle
from acclimate_bench.accuracy.methods import METHODS, Method, Options
from acclimate_bench.accuracy.report import left_out, rounded, signed, table
from acclimate_bench.data.shift import Shift
from acclimate_bench.errors import BenchError
from acclimate_bench.guard.report import second_half
from acclimate_bench.options import Progress

_WEIGHT: Final = "label_weight"


@dataclass(frozen=True, slots=True)
class Learned:
    """One method on one shift with one share of rows labelled: accuracy in % over the second half of the streams."""

    shift: str
    method: str
    share: float
    frozen: float
    without: float  # adapted, but learning nothing
    by_weight: tuple[float, ...]  # for each weight of a label: mean of the runs
    spread: float  # largest standard deviation of the runs of one weight, in points


def learners(chosen: Sequence[Method]) -> tuple[Method, ...]:
    """Those methods that can learn from labels; all there are if none is chosen.

    Raises:
        BenchError: some of the chosen ones cannot.
    """
    able = tuple(m for m in METHODS if m.adapter in ADAPTERS and _WEIGHT in ADAPTERS[m.adapter].__dataclass_fields__)
    unable = [method.name for method in chosen if method not in able]
    if unable:
        names = ", ".join(method.name for method in able)
        raise BenchError(f"{', '.join(unable)} learn nothing from labels; there are {names}")
    return tuple(chosen) or able


def count_runs(methods: Sequence[Method], weights: Sequence[float], shares: Sequence[float], seeds: int) -> int:
    """How often `measure` reports to its progress on one shift, of which it can measure every method."""
    return len(methods) * (1 + len(weights) * len(shares) * seeds)


def measure(
    shift: Shift,
    methods: Sequence[Method],
    weights: Sequence[float],
    shares: Sequence[float],
    seeds: int,
    done: Progress,
) -> Iterator[Learned | LeftOut]:
    """Run methods, of `learners`, with labels of several weights and without.

    Args:
        shift, methods: what to run.
        weights: of a label, above 0.
        shares: of rows labelled, 0..1.
        seeds: runs, each with other rows labelled.
        done: called after each run.
    """
    frozen = second_half(frozen_classes(shift, lambda _: None) == shift.labels)
    for method in methods:
        reason = obstacle(method, shift)
        if reason is not None:
            yield LeftOut(method.name, shift.name, reason)
            continue
        options = method.hyperparameters(shift.hparams, seed=0)
        without = second_half(_hits(create(method.adapter, **options), shift, np.zeros(shift.labels.shape, bool)))
        done(f"{shift.name} {method.name}")
        for share in shares:
            runs = [
                [_run(method, {**options, _WEIGHT: weight}, shift, share, seed, done) for seed in range(seeds)]
                for weight in weights
            ]
            means, spread = tuple(map(statistics.fmean, runs)), max(map(statistics.pstdev, runs))
            yield Learned(shift.name, method.name, share, frozen, without, means, spread)


def _run(method: Method, options: Options, shift: Shift, share: float, seed: int, done: Progress) -> float:
    """Accuracy over the second half with some of the rows labelled."""
    told = np.random.default_rng(seed).random(shift.labels.shape) < share
    accuracy = second_half(_hits(create(method.adapter, **options), shift, told))
    done(f"{shift.name} {method.name} {share:g} {options[_WEIGHT]:g}")
    return accuracy


def _hits(adapter: Adapter, shift: Shift, told: NDArray[np.bool_]) -> Hits:
    """Where the adapted answers [C, N] are right, when the rows [C, N] of `told` are labelled after their answer."""
    return np.stack(
        [
            _stream(adapter, shift.model, shift.x(row), torch.from_numpy(labels), torch.from_numpy(told[row]))
            for row, labels in enumerate(shift.labels)
        ]
    )


def _stream(
    adapter: Adapter, model: FrozenModel, x: torch.Tensor, labels: torch.Tensor, told: torch.Tensor
) -> NDArray[np.bool_]:
    state, hits = adapter.init(model), []
    for images, classes, known in zip(*(torch.split(each, BATCH) for each in (x, labels, told)), strict=True):
        step = adapter.step(model, state, images)
        hits.append(step.logits.argmax(dim=1) == classes)
        state = step.state
        if learns(adapter) and bool(known.any()):
            state = adapter.learn(model, state, Labelled(classes[known]))
    return torch.cat(hits).numpy()


def to_text(results: Sequence[Learned | LeftOut], weights: Sequence[float], seeds: int) -> str:
    """A table in Markdown for each share of rows labelled."""
    learned = [each for each in results if isinstance(each, Learned)]
    missing = [each for each in results if isinstance(each, LeftOut)]
    heading = ("shift", "method", "frozen", "no labels", *(f"weight {weight:g}" for weight in weights), "spread")
    parts = [
        f"Top-1 accuracy in % of the adapted answers over the second half of the streams, {seeds} runs with other rows "
        "labelled; for each weight of a label the gain in points over learning nothing. `spread`: largest standard "
        "deviation between the runs."
    ]
    for share in sorted({each.share for each in learned}):
        rows = [_row(each) for each in learned if each.share == share]
        parts += [f"## {100 * share:g} % of rows labelled", table(heading, rows)]
    if missing:
        parts += ["## Left out", left_out(missing)]
    return "\n\n".join(parts) + "\n"


def _row(each: Learned) -> list[str]:
    gains = [signed(accuracy - each.without, 1) for accuracy in each.by_weight]
    accuracies = [f"{rounded(value, 1):.1f}" for value in (each.frozen, each.without)]
    return [each.shift, each.method, *accuracies, *gains, f"{rounded(each.spread, 1):.1f}"]
