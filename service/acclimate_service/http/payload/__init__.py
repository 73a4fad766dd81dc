"""Request bodies to the canonical batch of images.

Decoding is a generator of steps, so that bodies of many pictures can take turns and be given up between two of them.
"""

from collections.abc import Generator, Mapping, Sequence
from typing import Final

from acclimate_adapters.adapter import complete
from acclimate_store import InputSpec

from .arrays import ARRAYS, RAW, TENSOR_HEADERS, Batch, check_tensor_headers
from .content_encoding import inflate, too_large, window_of
from .documents import Json, Labels, check_document, decode_document, load_json, parse_labels, read_labels
from .forms import read_form
from .images import decode_images
from .inference import INPUT, OUTPUTS, Inference, decoding_tensor, read_inference
from .limits import PayloadCode, PayloadError, PayloadLimits
from .media import MEDIA_TYPES, media_type, unsupported

__all__ = [
    "ARRAYS",
    "BODY_HEADERS",
    "INPUT",
    "MEDIA_TYPES",
    "OUTPUTS",
    "RAW",
    "Batch",
    "Inference",
    "Json",
    "Labels",
    "PayloadCode",
    "PayloadError",
    "PayloadLimits",
    "check_headers",
    "decode",
    "decode_labelled",
    "decoding",
    "decoding_labelled",
    "decoding_labelled_document",
    "decoding_tensor",
    "inflate",
    "load_json",
    "media_type",
    "read_inference",
    "too_large",
    "unsupported",
    "window_of",
]


LABELS: Final = "x-labels"
BODY_HEADERS: Final = TENSOR_HEADERS | {LABELS}
"""Those that describe a body, or what is beside it, in lower case."""


def check_headers(headers: Mapping[str, str], limits: PayloadLimits) -> None:
    """Refuse headers (names in lower case) that describe nothing, also beside a body that needs no description.

    Raises:
        PayloadError: `invalid_request`, `wrong_dtype`, `invalid_labels`, `body_too_large`.
    """
    check_tensor_headers(headers)
    if LABELS in headers and not isinstance(parse_labels(headers[LABELS], limits), list):
        raise PayloadError("invalid_labels", 'X-Labels is no list; send one such as [0, 3, "Coat"]')


def decoding(
    body: bytes, content_type: str, headers: Mapping[str, str], spec: InputSpec, limits: PayloadLimits
) -> Generator[None, None, Batch]:
    """Decode one request body, a picture at each step. Pure and blocking: meant for a worker thread.

    Args:
        body: the whole body, already bounded in size.
        content_type: the Content-Type header; `MEDIA_TYPES` are accepted. The image types are synonyms.
        headers: the request headers, of which `X-Tensor-Shape`, `-Layout` and `-Dtype` are read, in any case.
        spec: the model's input.
        limits: what the body may expand to.

    Returns:
        [B, C, H, W], B >= 1, before normalisation: uint8 in 0..255 or float32 in 0..1 (+- 1e-3), C-contiguous;
        perhaps a view of `body`, and not to be written to.

    Raises:
        PayloadError: for every body that is refused, and nothing else.
    """
    match media_type(content_type):
        case "application/json":
            return (yield from decode_document(check_document(load_json(body)), spec, limits))
        case "multipart/form-data":
            return (yield from decode_images(read_form(body, content_type, limits).files, spec, limits))
        case kind if kind in ARRAYS:
            return ARRAYS[kind](body, {name.lower(): value for name, value in headers.items()}, spec, limits)
        case kind if kind in MEDIA_TYPES:
            return (yield from decode_images([body], spec, limits))
        case _:
            raise unsupported(content_type, MEDIA_TYPES)


def decoding_labelled(
    body: bytes,
    content_type: str,
    headers: Mapping[str, str],
    spec: InputSpec,
    limits: PayloadLimits,
    classes: Sequence[str],
) -> Generator[None, None, tuple[Batch, Labels]]:
    """Decode a request body of images and their labels, a picture at each step, as `decoding` does.

    The labels are a JSON list with a class index or a class name for every image: the member `labels` of a JSON body,
    the part `labels` of a form, and the header `X-Labels` of all other bodies.

    Args:
        body, content_type, headers, spec, limits: as `decoding`.
        classes: names of the classes.

    Returns:
        The images as `decoding`, and int64 [B] in 0..K-1.

    Raises:
        PayloadError: `invalid_labels`, and what `decoding` raises.
    """
    match media_type(content_type):
        case "application/json":
            return (yield from decoding_labelled_document(load_json(body), spec, limits, classes))
        case "multipart/form-data":
            form = read_form(body, content_type, limits, "labels")
            labels = parse_labels(form.field, limits)
            images: Batch = yield from decode_images(form.files, spec, limits)
        case _:
            labels = parse_labels({name.lower(): value for name, value in headers.items()}.get(LABELS), limits)
            images = yield from decoding(body, content_type, headers, spec, limits)
    return images, read_labels(labels, classes, len(images))


def decoding_labelled_document(
    document: Json, spec: InputSpec, limits: PayloadLimits, classes: Sequence[str]
) -> Generator[None, None, tuple[Batch, Labels]]:
    """Decode a JSON body that `load_json` has read, as `decoding_labelled` does."""
    members = check_document(document, "labels")
    labels = members.pop("labels", None)
    images = yield from decode_document(members, spec, limits)
    return images, read_labels(labels, classes, len(images))


def decode(body: bytes, content_type: str, headers: Mapping[str, str], spec: InputSpec, limits: PayloadLimits) -> Batch:
    """Decode one request body at once; see `decoding`."""
    return complete(decoding(body, content_type, headers, spec, limits))


def decode_labelled(
    body: bytes,
    content_type: str,
    headers: Mapping[str, str],
    spec: InputSpec,
    limits: PayloadLimits,
    classes: Sequence[str],
) -> tuple[Batch, Labels]:
    """Decode a request body of images and their labels at once; see `decoding_labelled`."""
    return complete(decoding_labelled(body, content_type, headers, spec, limits, classes))
