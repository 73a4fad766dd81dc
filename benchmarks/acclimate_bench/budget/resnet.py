"""The ResNet-18 of `acclimate-bench budget`: 45 MB of weights, which nobody carries, so they are learned here.

network     from the clients of `label`, whose images are clean, by cross-entropy
rates       from the first clients of the other shifts, by Algorithm 1 of ATP
evaluated   all other clients of these shifts
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Final

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from numpy.typing import NDArray
from torch import Tensor, nn
from torchvision import models

from acclimate_adapters import FrozenModel, Source
from acclimate_adapters.methods.atp_training import average, refine
from acclimate_bench.accuracy.measure import BATCH
from acclimate_bench.data.fashion import FASHION
from acclimate_bench.data.shift import CLASSES, Shift
from acclimate_bench.errors import BenchError
from acclimate_bench.options import Progress, progress_bar
from acclimate_store import BundleError, Catalogue, InputSpec, Manifest, write_bundle

NAME: Final = "budget-resnet18"
VERSION: Final = "1"
CLEAN: Final = "label"
CORRUPTED: Final = tuple(shift for shift in FASHION if shift != CLEAN)
INPUT: Final = InputSpec(channels=3, height=32, width=32, mean=(0.286,) * 3, std=(0.353,) * 3)
FRAME: Final = 2
"""Pixels around an image, by which training also moves it."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """How network and rates are learned.

    The paper learns the rates with 0.1, in hundreds of rounds. Here each client takes 60 steps, so they are ten times
    as long: with 0.1 adaptation hardly gained anything, and with 2 the rates were NaN after ten rounds.

    Args:
        steps: of training, each on `rows` images, all classes equally often.
        rows: images of a step.
        lr: of the first step, falling to 0 along a cosine.
        teachers: clients of each corrupted shift from which the rates are learned.
        rounds: of learning rates, in each of which every teacher sends all its batches.
        rates_lr: eta of `refine`.
    """

    steps: int = 800
    rows: int = 32
    lr: float = 0.02
    teachers: int = 2
    rounds: int = 6
    rates_lr: float = 1.0


DEFAULT: Final = Recipe()


@dataclass(frozen=True, slots=True, eq=False)
class Coloured(Shift):
    """Clients of grey images [C, N, 28, 28] for a network that takes colours."""

    def x(self, row: int) -> Tensor:
        """Network input [N, 3, 32, 32] of one client."""
        return network_input(self.images[row])


def network_input(images: NDArray[np.uint8]) -> Tensor:
    """Grey images [N, 28, 28] with a black frame, three times: [N, 3, 32, 32], normalised."""
    framed = np.pad(images, ((0, 0), (FRAME, FRAME), (FRAME, FRAME)))
    return INPUT.normalise(np.repeat(framed[:, None], 3, axis=1))


def learned(clean: Shift, corrupted: Sequence[Shift], keep: Path | None, recipe: Recipe = DEFAULT) -> list[Shift]:
    """The clients that are to be evaluated, and the ResNet-18 that was learned from the others.

    Args:
        clean: whose clients train the network.
        corrupted: whose first clients teach the rates.
        keep: a model store: the network is taken from there or, if it is not there yet, published there.
        recipe: how to learn.

    Raises:
        BenchError: there are too few clients, or the kept network cannot be used.
    """
    for shift in corrupted:
        if len(shift.clients) <= recipe.teachers:
            raise BenchError(
                f"{shift.name} has {len(shift.clients)} clients; at least {recipe.teachers + 1} are needed"
            )
    manifest = _manifest(clean, corrupted, recipe)
    model = _kept(keep, manifest) if keep else None
    if model is None:
        model = _learn(clean, corrupted, recipe, keep, manifest)
    return [_evaluated(shift, model, recipe.teachers) for shift in corrupted]


def is_kept(keep: Path | None) -> bool:
    """Whether the network is there and need not be learned."""
    return keep is not None and (keep / NAME / VERSION).exists()


def unseen(clean: Shift, corrupted: Sequence[Shift]) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Images [N, 28, 28] and labels [N] of the clean clients, without those that others have as well."""
    elsewhere = {image.tobytes() for shift in corrupted for client in shift.images for image in client}
    images, labels = clean.images.reshape(-1, *clean.images.shape[2:]), clean.labels.reshape(-1)
    own = np.array([image.tobytes() not in elsewhere for image in images])
    return images[own], labels[own]


def train(images: NDArray[np.uint8], labels: NDArray[np.int64], recipe: Recipe, progress: Progress) -> nn.Module:
    """A ResNet-18 in evaluation mode, learned from images [N, 28, 28] with labels [N]."""
    draw = torch.Generator().manual_seed(0)
    x, y = network_input(images).contiguous(memory_format=torch.channels_last), torch.from_numpy(labels)
    chances = (1 / torch.bincount(y, minlength=CLASSES))[y]
    net = _new().to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(net.parameters(), recipe.lr, momentum=0.9, weight_decay=5e-4, nesterov=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, recipe.steps)
    for _ in range(recipe.steps):
        rows = torch.multinomial(chances, recipe.rows, replacement=True, generator=draw)
        optimizer.zero_grad()
        torch.autograd.backward(F.cross_entropy(net(_varied(x[rows], draw)), y[rows]))
        optimizer.step()
        schedule.step()
        progress("network")
    return net.to(memory_format=torch.contiguous_format).eval()


def teach(
    model: FrozenModel, clients: Sequence[tuple[Tensor, Tensor]], recipe: Recipe, progress: Progress
) -> dict[str, float]:
    """Adaptation rates learned from clients, each with inputs [N, 3, 32, 32] and labels [N] (ATP, Algorithm 1)."""
    rates = dict.fromkeys(model.modules, 0.0)
    for _ in range(recipe.rounds):
        rates = average([_taught(model, rates, *client, recipe.rates_lr, progress) for client in clients])
    return rates


def _taught(
    model: FrozenModel, rates: Mapping[str, float], x: Tensor, labels: Tensor, lr: float, progress: Progress
) -> Mapping[str, float]:
    """Rates after the batches of one client (ClientTrain)."""
    for batch, classes in zip(torch.split(x, BATCH), torch.split(labels, BATCH), strict=True):
        rates = refine(model, rates, batch, classes, lr)
    progress("rates")
    return rates


def _learn(
    clean: Shift, corrupted: Sequence[Shift], recipe: Recipe, keep: Path | None, manifest: Manifest
) -> FrozenModel:
    prior = torch.full((CLASSES,), 1 / CLASSES)
    with progress_bar(recipe.steps, "step") as advance:
        net = train(*unseen(clean, corrupted), recipe, advance)
    bare = FrozenModel.from_module(net, classifier="fc", source=Source(prior=prior))
    clients = [
        (network_input(shift.images[row]), torch.from_numpy(shift.labels[row]))
        for shift in corrupted
        for row in range(recipe.teachers)
    ]
    with progress_bar(recipe.rounds * len(clients), "client") as advance:
        source = Source(prior=prior, rates=teach(bare, clients, recipe, advance))
    if keep:
        write_bundle(keep, manifest, net, source)
    return FrozenModel.from_module(net, classifier="fc", source=source)


def _new() -> nn.Module:
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        net: nn.Module = models.resnet18(num_classes=CLASSES)
    return net


def _varied(x: Tensor, draw: torch.Generator) -> Tensor:
    """A batch moved by some pixels, each image of it mirrored or not."""
    down, right = torch.randint(-FRAME, FRAME + 1, (2,), generator=draw).tolist()
    mirrored = torch.rand(len(x), 1, 1, 1, generator=draw) < 0.5
    moved = x.roll((down, right), (2, 3))
    return torch.where(mirrored, moved.flip(3), moved)


def _evaluated(shift: Shift, model: FrozenModel, teachers: int) -> Shift:
    parts = {each.name: getattr(shift, each.name) for each in fields(Shift)}
    rest = {name: parts[name][teachers:] for name in ("clients", "images", "labels")}
    return Coloured(**(parts | rest | {"model": model, "spec": INPUT}))


def _manifest(clean: Shift, corrupted: Sequence[Shift], recipe: Recipe) -> Manifest:
    digest = hashlib.sha256()
    for shift in (clean, *corrupted):
        digest.update(shift.images.tobytes() + shift.labels.tobytes())
    return Manifest(
        schema_version=1,
        name=NAME,
        version=VERSION,
        architecture="torchvision:resnet18",
        architecture_options={"num_classes": CLASSES},
        classifier="fc",
        input=INPUT,
        classes=tuple(f"class {k}" for k in range(CLASSES)),
        files={},
        metrics={},
        licence="CC0-1.0",
        provenance=f"acclimate-bench budget, {recipe}, from clients with the sha256 {digest.hexdigest()}",
    )


def _kept(keep: Path, manifest: Manifest) -> FrozenModel | None:
    if not is_kept(keep):
        return None
    try:
        bundle = Catalogue(keep).load(NAME, VERSION)
    except BundleError as error:
        raise BenchError(f"delete {keep / NAME}, which cannot be used: {error}") from error
    if bundle.manifest.provenance != manifest.provenance:
        raise BenchError(f"delete {keep / NAME}, which was learned from other clients or in another way")
    return bundle.model
