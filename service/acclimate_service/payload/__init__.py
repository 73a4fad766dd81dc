"""Request bodies to the canonical batch of images."""

from collections.abc import Mapping

from acclimate_store import InputSpec

from .arrays import Batch
from .documents import decode_json
from .errors import PayloadCode, PayloadError
from .forms import read_files
from .images import decode_images
from .limits import PayloadLimits
from .tensors import decode_npy, decode_raw

__all__ = ["MEDIA_TYPES", "Batch", "PayloadCode", "PayloadError", "PayloadLimits", "decode"]

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
    match content_type.partition(";")[0].strip().lower():
        case "application/json":
            return decode_json(body, spec, limits)
        case "multipart/form-data":
            return decode_images(read_files(body, content_type, limits), spec, limits)
        case "image/png" | "image/jpeg":
            return decode_images([body], spec, limits)
        case "application/x-npy":
            return decode_npy(body, named, spec, limits)
        case "application/octet-stream":
            return decode_raw(body, named, spec, limits)
        case _:
            detail = f"Content-Type {content_type[:60]!r} is not accepted; send {', '.join(MEDIA_TYPES)}"
            raise PayloadError("unsupported_media_type", detail)
