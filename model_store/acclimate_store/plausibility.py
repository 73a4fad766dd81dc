"""Whether a model answers labelled images as well as it should, and what is probably wrong where it does not.

The service cannot notice that pixels, their normalisation or the order of the classes differ from those of training:
it answers all the same, and badly. Labelled images show it.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from acclimate_store.bundle import Bundle
from acclimate_store.errors import MeasureError

GAIN: Final = 0.1
"""Accuracy by which another reading of the same images must be better to be the probable cause."""
CHANCE: Final = 1e-4
"""Largest chance that it is so much better by accident (sign test on the images that only one reading gets right)."""
IMAGENET: Final = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
_CHUNK: Final = 64
Change = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Reading:
    """Another way to read images, in words, as network input made of pixels [N, C, H, W] in 0..1."""

    name: str
    way_out: str
    input: Change


class Cause(NamedTuple):
    """What is probably wrong."""

    accuracy: float  # without it
    text: str


def check_range(images: NDArray[Any], name: str) -> None:
    """Refuse pixels that are not what they should be, by their numbers alone.

    Raises:
        MeasureError: floats outside 0..1, NaN, or uint8 that hold 0 and 1 alone.
    """
    if images.dtype == np.uint8:
        if len(images) >= 8 and int(images.max()) == 1:
            raise MeasureError(f"{name}: the images are uint8 without a pixel above 1; uint8 is 0..255: save 255 times")
        return
    low, high = float(images.min()), float(images.max())
    if math.isnan(low) or math.isinf(high - low):
        raise MeasureError(f"{name}: an image holds NaN or infinite numbers")
    if high > 16:
        raise MeasureError(
            f"{name}: the images are floats up to {high:g}; floats are 0..1: divide by 255, or save uint8"
        )
    if low < -0.01 or high > 1.01:
        raise MeasureError(
            f"{name}: the images are floats from {low:.3g} to {high:.3g}; give pixels in 0..1 that are not normalised: "
            "the bundle's mean and std do that"
        )


def other_reading(
    bundle: Bundle, images: Tensor, labels: Tensor, own: tuple[Sequence[float], Sequence[float]]
) -> Cause | None:
    """What would make the model answer images much better; None if nothing that is tried does.

    Args:
        bundle: the model.
        images: [N, C, H, W], pixels in 0..1.
        labels: [N], int64.
        own: mean and standard deviation of the data per channel.
    """
    hits = _hits(bundle, images, labels, bundle.manifest.input.normalise)
    best, gain = None, 0.0
    for reading in _readings(bundle, own):
        other = _hits(bundle, images, labels, reading.input)
        wins, losses = int((other & ~hits).sum()), int((hits & ~other).sum())
        difference = (wins - losses) / len(labels)
        if difference > max(gain, GAIN) and sign_test(wins, losses) < CHANCE:
            best, gain = (reading, float(other.double().mean())), difference
    if best is None:
        return None
    reading, accuracy = best
    return Cause(
        accuracy,
        f"{reading.name}: of {len(labels)} images {_percent(accuracy)} are answered right, and "
        f"{_percent(float(hits.double().mean()))} as they are. {reading.way_out}",
    )


def permuted_classes(counts: NDArray[np.float64], classes: Sequence[str]) -> Cause | None:
    """How classes are permuted; None if they are not.

    Args:
        counts: [K, K], answers i to images of class j.
        classes: names.
    """
    answered = _assignment(counts / np.maximum(counts.sum(axis=0), 1))
    own = np.arange(len(classes))
    accuracy, possible = np.trace(counts) / counts.sum(), counts[answered, own].sum() / counts.sum()
    if possible - accuracy < GAIN:
        return None
    order = [classes[int(np.flatnonzero(answered == output)[0])] for output in range(len(classes))]
    example = int(np.flatnonzero(answered != own)[0])
    share = counts[answered[example], example] / max(counts[:, example].sum(), 1)
    return Cause(
        float(possible),
        f"the classes are permuted: {_percent(share)} of the images of {classes[example]} are answered "
        f"{classes[answered[example]]}. In the order {','.join(order)} {_percent(possible)} of the answers would be "
        f"right, and {_percent(accuracy)} are. Create the model with these --classes, or correct the labels",
    )


def _assignment(shares: NDArray[np.float64]) -> NDArray[np.int64]:
    """The answer that belongs to each class, [K]: the largest share first, no answer twice."""
    left, answered = shares.copy(), np.zeros(len(shares), np.int64)
    for _ in range(len(shares)):
        answer, label = np.unravel_index(left.argmax(), left.shape)
        answered[label] = answer
        left[answer, :], left[:, label] = -1, -1
    return answered


def sign_test(wins: int, losses: int) -> float:
    """Chance of at least so many wins among wins and losses if both are as likely."""
    total = wins + losses
    return float(sum(math.comb(total, k) for k in range(wins, total + 1)) / 2**total)


def _readings(bundle: Bundle, own: tuple[Sequence[float], Sequence[float]]) -> Iterator[Reading]:
    spec = bundle.manifest.input
    if spec.channels == 3:
        yield Reading(
            "the channels are swapped, RGB and BGR",
            "Give images in the order of training, or exchange the first and last column of the first layer's weights",
            lambda x: spec.normalise(x.flip(1)),
        )
    if spec.height == spec.width:
        yield Reading(
            "height and width are exchanged",
            "Give images [N, C, H, W] upright",
            lambda x: spec.normalise(x.transpose(2, 3).contiguous()),
        )
    yield Reading(
        "the images are inverted, black for white",
        "Give 255 - image, or 1 - image",
        lambda x: spec.normalise(1 - x),
    )
    normalisations: dict[str, tuple[Sequence[float], Sequence[float]]] = {
        "pixels in 0..255 that are not normalised": ((0.0,), (1 / 255,)),
        "no normalisation (--mean 0 --std 1)": ((0.0,), (1.0,)),
        "--mean 0.5 --std 0.5": ((0.5,), (0.5,)),
        "the mean and std of these images": own,
    }
    if spec.channels == 3:
        normalisations["the mean and std of ImageNet (--mean 0.485,0.456,0.406 --std 0.229,0.224,0.225)"] = IMAGENET
    for name, (mean, std) in normalisations.items():
        way_out = (
            "Divide by 255 in training, or fold the factor into the first layer's weights"
            if "0..255" in name
            else "Create the model again with the mean and std of its training"
        )
        yield Reading(f"the network was probably trained with {name}", way_out, _normalisation(mean, std))


def _normalisation(mean: Sequence[float], std: Sequence[float]) -> Change:
    m, s = (torch.tensor(values).view(1, -1, 1, 1) for values in (mean, std))
    return lambda x: (x - m) / s


def _hits(bundle: Bundle, images: Tensor, labels: Tensor, change: Change) -> Tensor:
    """Which images are answered right, [N] bool."""
    chunks = zip(torch.split(images, _CHUNK), torch.split(labels, _CHUNK), strict=True)
    model = bundle.model
    answers = [(model.forward(model.batch(change(x)), {}).argmax(1).cpu(), y) for x, y in chunks]
    return torch.cat([found == y for found, y in answers])


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"
