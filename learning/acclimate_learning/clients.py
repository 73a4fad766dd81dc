"""Clients as they will be: simulated from labelled images, or real ones that the data name.

A simulated client has a label shift, drawn from a partition, a feature shift, which is a corruption at a severity, or
both. Some clients teach, some tune what is learned, and some judge it; no image is in two of these roles, and those who
judge have corruptions that nothing was learned or tuned by.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from acclimate_learning.corruptions import SEVERITIES, corrupt
from acclimate_learning.errors import LearningError
from acclimate_store.datasets import LabelledImages

T = TypeVar("T")
Role = Literal["teach", "tune", "judge"]
Shift = Literal["mixed", "both", "label", "feature", "none"]
Families = Mapping[Role, tuple[str, ...]]
Images = NDArray[np.uint8]
Labels = NDArray[np.int64]

ROLES: Final[tuple[Role, ...]] = ("teach", "tune", "judge")
KINDS: Final = ("feature", "label", "both")
"""What the clients of a mixed population have in turn."""
_TEACHING: Final = (
    "gaussian_noise", "shot_noise", "impulse_noise", "defocus_blur", "motion_blur", "zoom_blur", "fog",
    "brightness", "contrast", "elastic", "pixelate", "jpeg",
)  # fmt: skip
FAMILIES_OF: Final[Families] = {
    "teach": _TEACHING,
    "tune": (*_TEACHING, "posterize", "vignette", "dead_rows"),
    "judge": ("speckle_noise", "gaussian_blur", "spatter", "gamma"),
}  # fmt: skip
"""Corruptions of each role; teaching and judging ones as in ATP's experiments. Those of the tuning clients hold the
teaching ones, as the paper's validation sets do: by a few others alone, rates that help judges less looked as good."""
SHARES: Final[dict[Role, float]] = {"teach": 0.5, "tune": 0.2, "judge": 0.3}
"""Of the images of each class, and of the clients that the data name."""
MOST_BYTES: Final = 2**30
"""Most bytes of images that are kept; of more, every second, third, ... is taken."""


@dataclass(frozen=True, slots=True, eq=False)
class Client:
    """What one client sends, in order.

    Args:
        name: of the client.
        images: uint8 [N, C, H, W].
        labels: [N]; adapters never see them.
        shift: what is shifted, in words.
        kind: "feature", "label", "both" or "none"; "own" for real clients.
    """

    name: str
    images: Images
    labels: Labels
    shift: str
    kind: str


@dataclass(frozen=True, slots=True, eq=False)
class Pool:
    """Labelled images from which clients are made: uint8 [N, C, H, W], classes [N], and whose they are, [N] or None."""

    images: Images
    labels: Labels
    owners: NDArray[np.str_] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Population:
    """How clients are made.

    Args:
        shift: "both": label and feature shift; "mixed": clients with either, and with both, in turn.
        partition: of label shift: "step" (2 major classes with 80 % of the images), "dirichlet:0.3" (its
            concentration), or "pathological:2" (that many classes alone).
        teachers: clients that teach, of `teacher_images` each.
        judges: clients that judge, of `judge_images` each; half as many tune.
        teacher_images: of each teaching client.
        judge_images: of each tuning and judging client.
        seed: of all that is drawn.
        families: corruptions of each role.
    """

    shift: Shift = "mixed"
    partition: str = "step"
    teachers: int = 60
    judges: int = 40
    teacher_images: int = 40
    judge_images: int = 200
    seed: int = 0
    families: Families = field(default_factory=lambda: FAMILIES_OF)


def read_pool(data: LabelledImages, most_bytes: int = MOST_BYTES) -> Pool:
    """Labelled images in memory, or a part of them where they would not fit.

    Raises:
        LearningError: they are floats with other values than 8 bits have.
    """
    images: list[Images] = []
    labels: list[Labels] = []
    owners: list[tuple[str, ...]] = []
    step = 1
    for batch in data.batches(64):
        pixels = batch.images
        if pixels.dtype != np.uint8:
            pixels = np.round(pixels * 255).astype(np.uint8)
        if not images:
            step = max(1, -(-data.rows * pixels[0].nbytes // most_bytes))
        images.append(pixels[::step])
        labels.append(batch.labels[::step])
        owners.append(batch.clients[::step] if batch.clients else ())
    named = np.array([name for part in owners for name in part]) if owners[0] else None
    return Pool(np.concatenate(images), np.concatenate(labels), named)


def simulate(pool: Pool, population: Population, role: Role) -> list[Client]:
    """Clients of a role.

    Raises:
        LearningError: there are too few images for them.
    """
    if pool.owners is not None:
        return _named(pool, role, population)
    rows = _share(pool, population.seed, role)
    count = {"teach": population.teachers, "tune": max(1, population.judges // 2), "judge": population.judges}[role]
    number = population.teacher_images if role == "teach" else population.judge_images
    _require_enough(rows, population, role, count, number)
    return [_client(pool, rows, population, role, index, number) for index in range(count)]


def _require_enough(
    rows: Sequence[NDArray[np.int64]], population: Population, role: Role, count: int, number: int
) -> None:
    """Refuse clients that want more images of a class than there are, with a size that would do for all of them."""
    wanted = np.stack([_class_counts(population, role, index, len(rows), number)[0] for index in range(count)])
    there = np.array([len(each) for each in rows])
    if not (wanted > there).any():
        return
    fits, option = number * int(there.min()) // int(wanted.max()), "judge" if role != "teach" else "teacher"
    way = f"give more data, or smaller clients: --{option}-images {fits}" if fits else "give more data"
    raise LearningError(
        f"a client has up to {wanted.max()} images of a class, and of one there are {there.min()} for those that "
        f"{role}; {way}"
    )


def _class_counts(
    population: Population, role: Role, index: int, classes: int, number: int
) -> tuple[Labels, np.random.Generator]:
    """How many images of each class a client has, and what draws the rest of it."""
    draw = np.random.default_rng([population.seed, ROLES.index(role), index])
    partition = population.partition if _kind(population, index) in ("label", "both") else "none"
    return class_counts(partition, classes, number, draw), draw


def class_counts(partition: str, classes: int, number: int, draw: np.random.Generator) -> Labels:
    """How many images of each class a client has, [K], `number` altogether.

    Raises:
        LearningError: there is no such partition.
    """
    name, _, parameter = partition.partition(":")
    try:
        match name:
            case "step":
                majors = draw.choice(classes, min(2, classes), replace=False)
                shares = np.full(classes, 0.2 / max(classes - 2, 1))
                shares[majors] = 0.4 if classes > 2 else 0.5
            case "dirichlet":
                concentration = float(parameter or 0.3)
                if not concentration > 0:
                    raise ValueError("a concentration is above 0")
                shares = draw.dirichlet(np.full(classes, concentration))
            case "pathological":
                shares = np.zeros(classes)
                shares[draw.choice(classes, int(parameter or 2), replace=False)] = 1
            case "none":
                shares = np.ones(classes)
            case _:
                raise ValueError("no such partition")
    except ValueError as error:
        raise LearningError(
            f"partition {partition!r} cannot be used ({error}); use step, dirichlet:0.3 or pathological:2"
        ) from error
    shares = shares / shares.sum()
    counts: Labels = np.floor(shares * number).astype(np.int64)
    rest = np.argsort(-(shares * number - counts), kind="stable")[: number - counts.sum()]
    counts[rest] += 1
    return counts


def _share(pool: Pool, seed: int, role: Role) -> list[NDArray[np.int64]]:
    """Rows of a role by class: the same whichever role is asked for first."""
    found = []
    for label in range(int(pool.labels.max()) + 1):
        rows = np.random.default_rng([seed, label, 7]).permutation(np.flatnonzero(pool.labels == label))
        ends = np.round(np.cumsum([0, *SHARES.values()]) * len(rows)).astype(int)
        place = ROLES.index(role)
        found.append(rows[ends[place] : ends[place + 1]])
    return found


def _client(
    pool: Pool, rows: Sequence[NDArray[np.int64]], population: Population, role: Role, index: int, number: int
) -> Client:
    kind = _kind(population, index)
    counts, draw = _class_counts(population, role, index, len(rows), number)
    chosen = np.concatenate([draw.choice(each, count, replace=False) for each, count in zip(rows, counts, strict=True)])
    chosen = draw.permutation(chosen)
    family, severity = "none", 0
    if kind in ("feature", "both"):
        before = sum(_kind(population, each) in ("feature", "both") for each in range(index))
        seed = population.seed, ROLES.index(role)
        family = _in_turn(population.families[role], before, *seed, 3)
        severity = _in_turn(SEVERITIES, before, *seed, 5)
    torch_draw = torch.Generator().manual_seed(int(draw.integers(2**31)))
    images = corrupt(torch.from_numpy(pool.images[chosen]), family, severity, torch_draw).numpy()
    words = [f"{family} {severity}"] if severity else []
    words += [population.partition] if kind in ("label", "both") and population.partition != "none" else []
    return Client(f"{role}-{index:02d}", images, pool.labels[chosen], " + ".join(words) or "none", kind)


def _kind(population: Population, index: int) -> str:
    return KINDS[index % len(KINDS)] if population.shift == "mixed" else population.shift


def _in_turn(values: Sequence[T], number: int, *seed: int) -> T:
    """One of some values, each of which is had once before any comes again, in an order drawn anew each time.

    Were they drawn one by one, of 20 clients 5 might have fog, and speak for what helps against it.
    """
    again, place = divmod(number, len(values))
    return values[int(np.random.default_rng([*seed, again]).permutation(len(values))[place])]


def _named(pool: Pool, role: Role, population: Population) -> list[Client]:
    """The clients that the data name, each in one role, in the order of their images."""
    owners = np.asarray(pool.owners)
    names = sorted(set(owners.tolist()))
    if len(names) < 5:
        raise LearningError(f"the column names {len(names)} clients; at least 5 are needed, better 30")
    order = np.random.default_rng([population.seed, 11]).permutation(len(names))
    ends = np.round(np.cumsum([0, *SHARES.values()]) * len(names)).astype(int)
    place = ROLES.index(role)
    chosen = sorted(names[i] for i in order[ends[place] : ends[place + 1]])
    return own_clients(pool, chosen)


def own_clients(pool: Pool, names: Sequence[str] | None = None) -> list[Client]:
    """The clients that the data name, with their images in the order of the data; all of them by default."""
    owners = np.asarray(pool.owners)
    chosen = sorted(set(owners.tolist())) if names is None else names
    rows = {name: np.flatnonzero(owners == name) for name in chosen}
    return [Client(name, pool.images[r], pool.labels[r], "its own", "own") for name, r in rows.items()]
