"""JSON: bodies of nested number lists or of image files in base64, and the labels of images."""

import base64
import json
from collections.abc import Generator, Sequence
from itertools import chain
from typing import Any, Final, TypeAlias

import numpy as np
import orjson
from numpy.typing import NDArray

from acclimate_store import InputSpec

from .arrays import LAYOUTS, Batch, Claim, canonical
from .images import decode_images
from .limits import PayloadError, PayloadLimits

Json: TypeAlias = Any
"""What a JSON text may stand for."""
Labels = NDArray[np.int64]

MAX_JSON_TOKENS: Final = 1_000_000
"""Values in a JSON text. Its parser holds the GIL: ten million lists stop everything for 8 s."""
_FIELDS = ("images", "layout", "dtype")
_DTYPES = ("uint8", "float32")


def load_json(data: bytes | str) -> Json:
    """Parse JSON, which may begin with a byte order mark. No other way leads to a parser.

    Raises:
        PayloadError: `malformed_body` for what is not JSON, `body_too_large` for what would take too long to parse,
            `invalid_request` for an object that has a member twice.
    """
    content = data.encode() if isinstance(data, str) else data.removeprefix(b"\xef\xbb\xbf")
    # Each value but the first of a list or object comes after a comma. Base64 has none of the three.
    if content.count(b",") + content.count(b"[") + content.count(b"{") > MAX_JSON_TOKENS:
        detail = f"a JSON body may hold {MAX_JSON_TOKENS} numbers and lists; send application/x-npy or base64 images"
        raise PayloadError("body_too_large", detail)
    try:
        document = orjson.loads(content)
        if content.count(b":") != _members(document):  # in a text, or of a member that another one has replaced
            json.loads(content, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise PayloadError("malformed_body", f"the body is not valid JSON: {error}") from error
    return document


def _members(value: Json) -> int:
    """Members of all objects, but for those in lists that begin with anything else."""
    if isinstance(value, dict):
        return len(value) + sum(map(_members, value.values()))
    return sum(map(_members, value)) if isinstance(value, list) and value and isinstance(value[0], dict) else 0


def _unique(members: list[tuple[str, Any]]) -> dict[str, Any]:
    names = dict(members)
    if len(names) < len(members):
        twice = next(name for name, _ in members if sum(name == other for other, _ in members) > 1)
        raise PayloadError("invalid_request", f"the member {twice[:40]!r} is there more than once in an object")
    return names


def decode_document(document: dict[str, Any], spec: InputSpec, limits: PayloadLimits) -> Generator[None, None, Batch]:
    """Read `{"images": [...], "layout"?: ..., "dtype"?: ...}`, as `check_document` gave it, a picture at each step.

    Numbers are uint8 when all are integers and float32 when any is not, unless `dtype` says otherwise. Integers of
    which the largest is 1 could be either, so they need `dtype`.

    Raises:
        PayloadError: `invalid_request`, `wrong_shape`, `wrong_dtype`, `ambiguous_dtype`, `out_of_range`, and what
            `canonical` and `decode_images` raise.
    """
    images = document["images"]
    limits.check_count(len(images))
    kinds = set(map(type, images))
    if kinds == {str}:
        return (yield from _decode_base64(document, spec, limits))
    if str in kinds:
        raise PayloadError("invalid_request", "images mixes base64 strings with numbers; send one or the other")
    shape, numbers = flatten(images)
    elements = to_array(numbers, document.get("dtype"))
    return canonical(Claim(elements, shape, document.get("layout")), spec, limits)


def check_document(document: Json, *further: str) -> dict[str, Any]:
    """The members of a JSON body, whose names are `images`, `layout`, `dtype` and the `further` ones.

    Raises:
        PayloadError: `invalid_request`, also for other members; `wrong_dtype`.
    """
    if not isinstance(document, dict) or not isinstance(document.get("images"), list):
        raise PayloadError("invalid_request", 'the body must be an object with a list: {"images": [...]}')
    known = (*_FIELDS, *further)
    unknown = [name for name in document if name not in known]
    if unknown:
        detail = f"unknown field {unknown[0][:40]!r}; the fields are {', '.join(known)}"
        raise PayloadError("invalid_request", detail)
    _check_choice(document, "layout", LAYOUTS)
    _check_choice(document, "dtype", _DTYPES)
    return document


def _check_choice(document: dict[str, Any], field: str, accepted: tuple[str, ...]) -> None:
    if field in document and document[field] not in accepted:
        detail = f"{field} {str(document[field])[:20]!r} is not accepted; use one of {', '.join(accepted)}"
        raise PayloadError("wrong_dtype" if field == "dtype" else "invalid_request", detail)


def _decode_base64(document: dict[str, Any], spec: InputSpec, limits: PayloadLimits) -> Generator[None, None, Batch]:
    if len(document) > 1:
        raise PayloadError("invalid_request", "layout and dtype describe numbers; leave them out for base64 images")
    files = [from_base64(text, index) for index, text in enumerate(document["images"])]
    return (yield from decode_images(files, spec, limits))


def from_base64(text: str, index: int) -> bytes:
    """The image file that a string holds.

    Raises:
        PayloadError: `undecodable_image`, with its place.
    """
    if text.startswith("data:"):
        detail = f"image {index} is a data URL; send the base64 alone, without what comes before the comma"
        raise PayloadError("undecodable_image", detail)
    try:
        return base64.b64decode(text, validate=True)
    except ValueError as error:
        detail = f"image {index} is not base64 (standard alphabet, padded, no line breaks): {error}"
        raise PayloadError("undecodable_image", detail) from error


def flatten(images: list[Any]) -> tuple[tuple[int, ...], list[Any]]:
    """Shape and leaves of nested lists. One pass per level, by containers: number by number is ten times slower.

    Raises:
        PayloadError: `wrong_shape` for lists of different lengths beside each other.
    """
    shape, level = [len(images)], images
    while list in (kinds := set(map(type, level))):
        lengths = set(map(len, level)) if kinds == {list} else set()
        if len(lengths) != 1:
            detail = f"images is ragged: lists at depth {len(shape)} must all have the same length and no bare numbers"
            raise PayloadError("wrong_shape", detail)
        shape.append(lengths.pop())
        level = list(chain.from_iterable(level))
    return tuple(shape), level


def to_array(numbers: list[Any], dtype: str | None) -> NDArray[Any]:
    """Numbers of JSON as an array: uint8, or float64 where they are floating; see `decode_document`.

    Raises:
        PayloadError: `wrong_dtype`, `ambiguous_dtype`, `out_of_range`.
    """
    kinds = set(map(type, numbers))
    if strange := kinds - {int, float}:
        detail = f"images holds {strange.pop().__name__} where numbers are accepted (or base64 strings, one per image)"
        raise PayloadError("wrong_dtype", detail)
    if dtype == "float32" or (dtype is None and float in kinds):
        return np.array(numbers, dtype=np.float64)
    if float in kinds:
        example = next(number for number in numbers if type(number) is float)
        raise PayloadError("wrong_dtype", f"dtype is uint8 but images holds {example}; send integers 0..255")
    return _to_uint8(numbers, dtype)


def _to_uint8(numbers: list[int], dtype: str | None) -> NDArray[np.uint8]:
    low, high = min(numbers, default=0), max(numbers, default=0)
    if low < 0 or high > 255:
        detail = f"integers run from {low} to {high}, but integer images are uint8 0..255"
        raise PayloadError("out_of_range", detail)
    if dtype is None and high == 1:
        detail = 'integers 0 and 1 may mean uint8 0..255 or float 0..1; state "dtype": "uint8" or "float32"'
        raise PayloadError("ambiguous_dtype", detail)
    return np.array(numbers, dtype=np.uint8)


def parse_labels(text: str | bytes | None, limits: PayloadLimits) -> Json:
    """What a header or a form part holds, which is JSON; None when it is not there.

    Raises:
        PayloadError: `invalid_labels`.
    """
    if text is None:
        return None
    limits.check_labels(len(text))
    try:
        return load_json(text)
    except PayloadError as error:
        detail = f'the labels are not valid JSON ({error.detail}); send a list such as [0, 3, "Coat"]'
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
