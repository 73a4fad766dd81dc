"""True labels of images, as class indices or class names."""

from collections.abc import Sequence

import numpy as np
import orjson
from numpy.typing import NDArray

from .errors import PayloadError

Labels = NDArray[np.int64]


def parse_labels(text: str | bytes | None) -> object:
    """What a header or a form part holds, which is JSON; None when it is not there.

    Raises:
        PayloadError: `invalid_labels`.
    """
    try:
        return None if text is None else orjson.loads(text)
    except orjson.JSONDecodeError as error:
        detail = f'the labels are not valid JSON ({error}); send a list such as [0, 3, "Coat"]'
        raise PayloadError("invalid_labels", detail) from error


def read_labels(labels: object, classes: Sequence[str], images: int) -> Labels:
    """Class index of every image, int64 [B] in 0..K-1.

    Args:
        labels: a list of indices and names, mixed as one likes.
        classes: names of the classes; where one is there twice, the name means the first.
        images: how many there are.

    Raises:
        PayloadError: `invalid_labels`.
    """
    if not isinstance(labels, list):
        raise PayloadError(
            "invalid_labels",
            "there are no labels: send a list with a class index or name for every image, as member `labels` of JSON, "
            "as part `labels` of a form, or in the header X-Labels",
        )
    if len(labels) != images:
        raise PayloadError("invalid_labels", f"there are {len(labels)} labels for {images} images; send one for each")
    by_name = {name: index for index, name in reversed([*enumerate(classes)])}
    return np.array([_index(label, at, by_name, len(classes)) for at, label in enumerate(labels)], dtype=np.int64)


def _index(label: object, at: int, by_name: dict[str, int], classes: int) -> int:
    if type(label) is int and 0 <= label < classes:
        return label
    if isinstance(label, str) and label in by_name:
        return by_name[label]
    names = ", ".join(by_name)
    detail = f"label {at} is {str(label)[:40]!r}; accepted are 0 to {classes - 1} and the names {names}"
    raise PayloadError("invalid_labels", detail[:600])
