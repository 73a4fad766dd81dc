"""The newest images of a client, which stay beside its state in memory where the operator allows it."""

from collections.abc import Collection, Iterator, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

MOST_KEPT: Final = 100
"""Images of one client, however small they are: as many as somebody looks through."""


class KeptImage(NamedTuple):
    """One image as it came.

    Args:
        request_id, row: by which its label may be told.
        image: [C, H, W], uint8 or float32 in 0..1, before normalisation.
        predicted: class that was answered.
    """

    request_id: str
    row: int
    image: NDArray[Any]
    predicted: int


def images_of(request_id: str, images: NDArray[Any], predicted: Sequence[int]) -> Iterator[KeptImage]:
    """A batch [B, C, H, W], image by image, in memory of their own: that of the request is to be free."""
    for row, (image, index) in enumerate(zip(images, predicted, strict=True)):
        yield KeptImage(request_id, row, np.array(image), index)


def those_kept(images: Sequence[KeptImage], asked: Collection[tuple[str, int]], budget: int) -> tuple[KeptImage, ...]:
    """As many images as there is room for: those whose labels are asked for first, of either kind the newest.

    Args:
        images: the newest last; they stay in this order.
        asked: request and row of each question.
        budget: bytes.
    """
    worth = sorted(range(len(images)), key=lambda at: (images[at][:2] in asked, at), reverse=True)
    kept, left = list[int](), budget
    for at in worth[:MOST_KEPT]:
        left -= images[at].image.nbytes
        if left < 0:
            break
        kept.append(at)
    return tuple(images[at] for at in sorted(kept))
