"""Request bodies to the canonical batch of images."""

from collections.abc import Mapping, Sequence

from acclimate_store import InputSpec

from .arrays import Batch, decode_npy, decode_raw
from .documents import (
    Labels,
    check_tokens,
    decode_document,
    decode_json,
    parse_document,
    parse_labels,
    read_labels,
)
from .forms import read_form
from .images import decode_images
from .limits import PayloadCode, PayloadError, PayloadLimits

__all__ = [
    "MEDIA_TYPES",
    "Batch",
    "Labels",
    "PayloadCode",
    "PayloadError",
    "PayloadLimits",
    "check_tokens",
    "decode",
    "decode_labelled",
]

MEDIA_TYPES = (
    "application/json",
    "multipart/form-data",
    "image/png",
    "image/jpeg",
    "application/x-npy",
    "application/octet-stream",
)


def decode(body: bytes, content_type: str, headers: Mapping[str, str], spec: InputSpec, limits: PayloadLimits) -> Batch:
    """Decode one request body. Pure and blocking: meant for a worker thread.

    Args:
        body: the whole body, already bounded in size.
        content_type: the Content-Type header; `MEDIA_TYPES` are accepted. The two image types are synonyms.
        headers: the request headers, of which `X-Tensor-Shape`, `-Layout` and `-Dtype` are read, in any case.
        spec: the model's input.
        limits: what the body may expand to.

    Returns:
        [B, C, H, W], B >= 1, before normalisation: uint8 in 0..255 or float32 in 0..1 (+- 1e-3), C-contiguous,
        writable and independent of `body`.

    Raises:
        PayloadError: for every body that is refused, and nothing else.
    """
    named = {name.lower(): value for name, value in headers.items()}
    match _media_type(content_type):
        case "application/json":
            return decode_json(body, spec, limits)
        case "multipart/form-data":
            return decode_images(read_form(body, content_type, limits).files, spec, limits)
        case "image/png" | "image/jpeg":
            return decode_images([body], spec, limits)
        case "application/x-npy":
            return decode_npy(body, named, spec, limits)
        case "application/octet-stream":
            return decode_raw(body, named, spec, limits)
        case _:
            detail = f"Content-Type {content_type[:60]!r} is not accepted; send {', '.join(MEDIA_TYPES)}"
            raise PayloadError("unsupported_media_type", detail)


def decode_labelled(
    body: bytes,
    content_type: str,
    headers: Mapping[str, str],
    spec: InputSpec,
    limits: PayloadLimits,
    classes: Sequence[str],
) -> tuple[Batch, Labels]:
    """Decode a request body of images and their labels. Pure and blocking: meant for a worker thread.

    The labels are a JSON list with a class index or a class name for every image: the member `labels` of a JSON body,
    the part `labels` of a form, and the header `X-Labels` of all other bodies.

    Args:
        body, content_type, headers, spec, limits: as `decode`.
        classes: names of the classes.

    Returns:
        The images as `decode`, and int64 [B] in 0..K-1.

    Raises:
        PayloadError: `invalid_labels`, and what `decode` raises.
    """
    match _media_type(content_type):
        case "application/json":
            document = parse_document(body, "labels")
            labels = document.pop("labels", None)
            images = decode_document(document, spec, limits)
        case "multipart/form-data":
            form = read_form(body, content_type, limits, "labels")
            labels = parse_labels(form.field)
            images = decode_images(form.files, spec, limits)
        case _:
            labels = parse_labels({name.lower(): value for name, value in headers.items()}.get("x-labels"))
            images = decode(body, content_type, headers, spec, limits)
    return images, read_labels(labels, classes, len(images))


def _media_type(content_type: str) -> str:
    return content_type.partition(";")[0].strip().lower()
