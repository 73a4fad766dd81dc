"""`acclimate models measure`: everything that adapters need of labelled images of the training side, in one pass.

Only sums over images are published, and the anchors: a few images, which whoever gets the model gets too.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from acclimate_adapters import Anchors, Source
from acclimate_adapters.balanced.moments import MomentCounter, MomentSums, moments_from_sums
from acclimate_adapters.errors import InputError
from acclimate_store.add_onnx import graphs_where_possible
from acclimate_store.bundle import Bundle
from acclimate_store.catalogue import BundleKey, Catalogue
from acclimate_store.datasets import LabelledImages, labelled_images
from acclimate_store.errors import MeasureError
from acclimate_store.manifest import Measured
from acclimate_store.plausibility import check_range, other_reading, permuted_classes
from acclimate_store.versions import model_with, next_version, publish, renewed

BATCH: Final = 64
"""Images per pass."""
FEW: Final = 10
"""With fewer images of a class than this, its column of the confusion matrix and its prototype are little more than
noise."""
SAMPLE: Final = 256
"""Images on which other readings of the data are tried."""
ANCHOR_BYTES: Final = 64 * 2**20
"""Most bytes of anchors that are taken unasked."""

PriorChoice = Literal["data", "uniform"]
Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """What the user may choose.

    Args:
        prior: "data" takes the shares of the classes in the images for the prior of training; "uniform" is for networks
            that were trained with balanced classes, whatever the images are.
        anchors: images of each class that are published with the model for `fed_ade`; None takes 8, or as many as fit
            in 64 MiB.
        graphs: whether to export graphs for ONNX Runtime, where the exporter is installed.
        force: publish although the answers are not plausible.
    """

    prior: PriorChoice = "data"
    anchors: int | None = None
    graphs: bool = True
    force: bool = False


@dataclass(frozen=True, slots=True)
class Found:
    """What was measured, and what the user should know of it."""

    key: BundleKey
    measured: Measured
    anchors: int
    notes: tuple[str, ...]


def measure(
    catalogue: Catalogue,
    key: BundleKey,
    data: Path,
    *,
    version: str | None = None,
    choices: Choices | None = None,
    progress: Progress = lambda done, rows: None,
) -> Found:
    """Measure a model on labelled images and publish the next version of its bundle with what was found.

    Args:
        catalogue: of the store.
        key: the bundle; without a version the newest.
        data: labelled images of the training side, every class among them; see `datasets`.
        version: of the new bundle; by default the next one after the newest.
        choices: of the user.
        progress: told the images measured so far, and how many there are.

    Raises:
        BundleError: there is no such bundle, the data cannot be used, or the model does not answer them as it should,
            with the probable cause. Nothing is published then.
    """
    choices = choices or Choices()
    key = catalogue.resolve(*key)
    new = BundleKey(key.name, version or next_version(catalogue.resolve(key.name)))
    bundle = catalogue.load(*key)
    spec, classes = bundle.manifest.input, bundle.manifest.classes
    images = labelled_images(data, spec, classes)
    made = f"Measured on {images.rows} labelled images of {images.path.name}."
    renewed(catalogue, bundle.manifest, new, made)  # refused now, before any work, if it will be
    sums = _Sums(bundle, _anchors_per_class(bundle, choices.anchors))
    try:
        done = 0
        for batch in images.batches(BATCH):
            check_range(batch.images, str(data))
            sums.add(batch.images, batch.labels)
            done += len(batch.labels)
            progress(done, images.rows)
    except InputError as error:
        raise MeasureError(f"{data}: {error}") from error
    measured = sums.measured(images)
    _require_every_class(measured, classes)
    if not choices.force:
        _require_plausible(bundle, sums, measured)
    source = sums.source(bundle.model.source, choices.prior)
    manifest = renewed(catalogue, bundle.manifest, new, made, measured=measured)
    model = model_with(catalogue, key, source)
    graphs, notes = graphs_where_possible(model, spec.shape) if choices.graphs else ({}, ())
    publish(catalogue, key, manifest, source, graphs)
    if model.classifier is None:
        notes = (*notes, "no prototypes and no descriptor: the network ends in no classifier whose input they are of")
    few = [name for name, rows in zip(classes, measured.rows, strict=True) if rows < FEW]
    if few:
        notes = (*notes, f"few images ({FEW} or more are wanted) of {', '.join(few[:5])}{', ...' if few[5:] else ''}: "
                 "bbse, fed_ade and prototypes are unreliable for these classes")  # fmt: skip
    return Found(new, measured, sums.anchors_per_class, notes)


class _Sums:
    """What is added up over the images of one pass.

    Args:
        bundle: the model.
        anchors_per_class: images of each class that are drawn, each as likely as any other.
    """

    def __init__(self, bundle: Bundle, anchors_per_class: int) -> None:
        model = bundle.model
        k, d = model.classes, model.feature_size
        self.anchors_per_class = anchors_per_class
        self._bundle = bundle
        self._moments = MomentCounter(model)
        self._features = torch.zeros(k, d, dtype=torch.float64)
        self._confusion = {mode: torch.zeros(k, k, dtype=torch.float64) for mode in ("soft", "hard")}
        self._pixels = np.zeros((2, bundle.manifest.input.channels))  # sums of pixels in 0..1 and of their squares
        self._draw = np.random.default_rng(0)
        self._anchors = [_Reservoir(anchors_per_class, self._draw) for _ in range(k)]
        self._sample = _Reservoir(SAMPLE, self._draw)

    @property
    def hard_counts(self) -> NDArray[np.float64]:
        """Answers i to images of class j, [K, K]."""
        return self._confusion["hard"].numpy()

    @property
    def sample(self) -> tuple[Tensor, Tensor]:
        """Some images [N, C, H, W] in 0..1 and their labels [N]."""
        images, labels = zip(*self._sample.kept, strict=True)
        return torch.from_numpy(np.stack([_unit(image) for image in images])), torch.tensor(labels)

    def add(self, images: NDArray[Any], labels: NDArray[np.int64]) -> None:
        """Add labelled images [B, C, H, W]."""
        classes = torch.from_numpy(labels)
        answer = self._moments.add(self._bundle.prepare(images), classes.to(self._bundle.model.device))
        k = self._bundle.model.classes
        membership = torch.nn.functional.one_hot(classes, k).double()
        logits = answer.logits.double().cpu()
        self._features += membership.T @ answer.features.double().cpu()
        self._confusion["soft"] += torch.softmax(logits, 1).T @ membership
        self._confusion["hard"] += torch.nn.functional.one_hot(logits.argmax(1), k).double().T @ membership
        unit = _unit(images).astype(np.float64)
        self._pixels += [unit.mean((2, 3)).sum(0), np.square(unit).mean((2, 3)).sum(0)]
        for image, label in zip(images, labels, strict=True):
            self._anchors[label].offer((image, int(label)))
            self._sample.offer((image, int(label)))

    def measured(self, images: LabelledImages) -> Measured:
        """The record of the manifest."""
        rows = self._moments.sums.rows.cpu()
        mean, square = self._pixels / images.rows
        return Measured(
            data=images.path.name or str(images.path),
            rows=tuple(int(count) for count in rows),
            accuracy=float(self._confusion["hard"].trace()) / images.rows,
            mean=tuple(round(float(m), 6) for m in mean),
            std=tuple(round(math.sqrt(max(float(s - m * m), 0)), 6) for m, s in zip(mean, square, strict=True)),
        )

    def source(self, origin: Source, prior: PriorChoice) -> Source:
        """The source with all that was measured; its rates are kept."""
        rows, has_features = self._moments.sums.rows.cpu(), self._bundle.model.classifier is not None
        shares = rows / rows.sum() if prior == "data" else torch.full_like(rows, 1 / len(rows))
        sums = MomentSums(rows, {layer: each.cpu() for layer, each in self._moments.sums.layers.items()})
        drawn = [entry for anchors in self._anchors for entry in anchors.kept]
        anchors = None
        if drawn:
            inputs = self._bundle.prepare(np.stack([image for image, _ in drawn])).cpu()
            anchors = Anchors(inputs, torch.tensor([label for _, label in drawn]))
        return replace(
            origin,
            prior=shares.float(),
            confusion={mode: (counts / rows).float() for mode, counts in self._confusion.items()},
            prototypes=(self._features / rows.unsqueeze(1)).float() if has_features else None,
            descriptor=(self._features.sum(0) / rows.sum()).float() if has_features else None,
            anchors=anchors,
            moments=moments_from_sums(sums, shares) if sums.layers else {},
        )


class _Reservoir:
    """Some of the entries that are offered, each as likely to be kept as any other (algorithm R)."""

    def __init__(self, size: int, draw: np.random.Generator) -> None:
        self.kept: list[tuple[NDArray[Any], int]] = []
        self._size, self._draw, self._offered = size, draw, 0

    def offer(self, entry: tuple[NDArray[Any], int]) -> None:
        """Keep the entry in the place of another, or not."""
        self._offered += 1
        place = int(self._draw.integers(self._offered))
        if len(self.kept) < self._size:
            self.kept.append((entry[0].copy(), entry[1]))
        elif place < self._size:
            self.kept[place] = (entry[0].copy(), entry[1])


def _unit(images: NDArray[Any]) -> NDArray[np.float32]:
    """Pixels in 0..1."""
    return np.divide(images, np.float32(255), dtype=np.float32) if images.dtype == np.uint8 else images


def _anchors_per_class(bundle: Bundle, asked: int | None) -> int:
    each = 4 * math.prod(bundle.manifest.input.shape) * len(bundle.manifest.classes)
    return min(8, ANCHOR_BYTES // each) if asked is None else asked


def _require_every_class(measured: Measured, classes: tuple[str, ...]) -> None:
    absent = [name for name, rows in zip(classes, measured.rows, strict=True) if rows == 0]
    if absent:
        raise MeasureError(
            f"{measured.data} holds no image of {', '.join(absent[:5])}{' and others' if absent[5:] else ''}; adapters "
            "need images of every class of the model"
        )


def _require_plausible(bundle: Bundle, sums: _Sums, measured: Measured) -> None:
    """Refuse to publish what shows that images are not given as in training."""
    images, labels = sums.sample
    causes = [
        permuted_classes(sums.hard_counts, bundle.manifest.classes),
        other_reading(bundle, images, labels, (measured.mean, measured.std)),
    ]
    cause = max((each for each in causes if each), default=None)
    total, accuracy = sum(measured.rows), measured.accuracy
    said = f"the frozen model answers {100 * accuracy:.1f} % of the images of {measured.data} right"
    way = "If everything is as it should be, publish with --force"
    if cause:
        raise MeasureError(f"{said}. Probable cause: {cause.text}.\n{way}")
    most = max(measured.rows) / total
    if accuracy <= most + 2 * math.sqrt(most * (1 - most) / total):
        raise MeasureError(
            f"{said}; to answer always the most frequent class would be as good ({100 * most:.1f} %). Are these the "
            f"weights that were trained, and the labels those of the classes {', '.join(bundle.manifest.classes[:5])}"
            f"{', ...' if bundle.manifest.classes[5:] else ''}?\n{way}"
        )
    expected = bundle.manifest.metrics.get("accuracy")
    if expected is not None:
        noise = 3 * math.sqrt(max(expected * (1 - expected), 0.01) / total)
        if abs(accuracy - expected) > 0.03 + noise:
            raise MeasureError(
                f"{said}; the bundle says {100 * expected:.1f} %. Are the images of the training side, resized and "
                f"normalised as in training?\n{way}"
            )
