"""Number arrays to the canonical batch: `.npy` files, raw little-endian tensors, and the numbers of JSON.

No reader allocates what a header merely claims.
"""

import io
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, Literal

import numpy as np
from numpy.lib import format as npy_format
from numpy.typing import NDArray

from acclimate_store import InputSpec

from .limits import PayloadError, PayloadLimits

Batch = NDArray[np.uint8] | NDArray[np.float32]

LAYOUTS = ("NHWC", "NCHW", "NHW")
ACCEPTED_DTYPES = "uint8 (0..255) or float32 (0..1)"

_DTYPES = tuple(map(np.dtype, ("uint8", "float16", "float32", "float64")))
_LAYOUT_HEADER = "x-tensor-layout"
_SHAPE_HEADER = "x-tensor-shape"
_DTYPE_HEADER = "x-tensor-dtype"
TENSOR_HEADERS: Final = frozenset((_SHAPE_HEADER, _LAYOUT_HEADER, _DTYPE_HEADER))
"""What describes a body of raw numbers."""

_RAW_DTYPES: dict[str, np.dtype[Any]] = {"uint8": np.dtype("u1"), "float32": np.dtype("<f4")}
_SHAPE = re.compile(r"[0-9]{1,10}( *, *[0-9]{1,10}){2,3}")
_MAX_NPY_HEADER = 1024  # NumPy writes 118 bytes for an unstructured array; its parser evaluates what it is given
_TOLERANCE = 1e-3  # what a round trip through float16 or a resampling filter may overshoot


@dataclass(frozen=True, slots=True)
class Claim:
    """What a body says about its array, before it is known to be true or even possible.

    Args:
        elements: one-dimensional, as many as `shape` multiplies to.
        shape: of any length; its extents may be too large for NumPy when one of them is 0.
        layout: one of `LAYOUTS`; None takes the only one that fits the model's input.
        order: how `elements` run through `shape`, as in NumPy.
    """

    elements: NDArray[Any]
    shape: tuple[int, ...]
    layout: str | None
    order: Literal["C", "F"] = "C"


def canonical(claim: Claim, spec: InputSpec, limits: PayloadLimits) -> Batch:
    """The batch as the model sees it before normalisation.

    Args:
        claim: [B, H, W, C], [B, C, H, W] or, for models of one channel, [B, H, W]; uint8 in 0..255 or a float type in
            0..1. Values up to 1e-3 outside are kept as they are.
        spec: the model's input; H, W and C must equal it.
        limits: bounds the number of images.

    Returns:
        [B, C, H, W], C-contiguous; uint8 stays uint8, floats of any width become float32. Where nothing is to be
        changed it is a view of the claim, and not to be written to.

    Raises:
        PayloadError: `wrong_dtype`, `empty_batch`, `too_many_images`, `invalid_request`, `wrong_shape`,
            `ambiguous_layout`, `non_finite`, `out_of_range`.
    """
    layout = _layout(claim.shape, claim.elements.dtype, claim.layout, spec, limits)
    array = claim.elements.reshape(claim.shape, order=claim.order)
    if array.dtype == np.uint8:
        return np.ascontiguousarray(_channels_first(array, layout))
    _check_floats(array)
    return np.ascontiguousarray(_channels_first(array, layout), dtype=np.float32)


def _brief(shape: tuple[int, ...]) -> str:
    """A shape for a message, cut where it is absurd."""
    return str(list(shape))[:80]


def _check_dtype(dtype: np.dtype[Any]) -> None:
    """Refuse all element types but uint8, float16, float32 and float64, in either byte order.

    Raises:
        PayloadError: `wrong_dtype`.
    """
    if dtype.hasobject:
        detail = f"object arrays are pickled and never read; send {ACCEPTED_DTYPES}"
        raise PayloadError("wrong_dtype", detail)
    if dtype.newbyteorder("=") not in _DTYPES:
        raise PayloadError("wrong_dtype", f"{str(dtype)[:40]} is not accepted; send {ACCEPTED_DTYPES}")


@lru_cache(maxsize=256)  # most clients send one shape
def _layout(
    shape: tuple[int, ...], dtype: np.dtype[Any], layout: str | None, spec: InputSpec, limits: PayloadLimits
) -> str:
    """The layout of an array that is as the model takes it, but for its values; raises as `canonical`."""
    _check_dtype(dtype)
    if shape:
        limits.check_count(shape[0])
    _check_layout(layout)
    accepted = _accepted_shapes(spec)
    fits = [name for name, extent in accepted.items() if shape[1:] == extent and layout in (None, name)]
    if not fits:
        raise PayloadError("wrong_shape", _misfit(shape, layout, accepted))
    if len(fits) > 1:
        detail = f"shape {_brief(shape)} fits {' and '.join(fits)}; state the layout"
        raise PayloadError("ambiguous_layout", detail)
    return fits[0]


def _accepted_shapes(spec: InputSpec) -> dict[str, tuple[int, ...]]:
    channels, height, width = spec.channels, spec.height, spec.width
    shapes: dict[str, tuple[int, ...]] = {"NHWC": (height, width, channels), "NCHW": (channels, height, width)}
    if channels == 1:
        shapes["NHW"] = (height, width)
    return shapes


def _check_layout(layout: str | None) -> None:
    if layout is not None and layout not in LAYOUTS:
        detail = f"layout {layout[:20]!r} is not accepted; use one of {', '.join(LAYOUTS)}"
        raise PayloadError("invalid_request", detail)


def _misfit(shape: tuple[int, ...], layout: str | None, accepted: dict[str, tuple[int, ...]]) -> str:
    stated = "" if layout is None else f" with layout {layout}"
    wanted = " or ".join(f"{name} [B, {', '.join(map(str, extent))}]" for name, extent in accepted.items())
    return f"the array has shape {_brief(shape)}{stated}; the model takes {wanted}"


def _check_floats(array: NDArray[Any]) -> None:
    finite = np.isfinite(array)
    if not finite.all():
        position = tuple(int(i) for i in np.unravel_index(np.argmin(finite), array.shape))
        raise PayloadError(
            "non_finite", f"the value at index {list(position)} is {array[position]}; send finite numbers"
        )
    low, high = float(array.min()), float(array.max())
    if low < -_TOLERANCE or high > 1 + _TOLERANCE:
        raise PayloadError(
            "out_of_range",
            f"values run from {low:g} to {high:g}, but float images are 0..1: divide by 255, or send uint8 0..255",
        )


def _channels_first(array: NDArray[Any], layout: str) -> NDArray[Any]:
    if layout == "NHWC":
        return array.transpose(0, 3, 1, 2)
    return array[:, None] if layout == "NHW" else array


def decode_npy(body: bytes, headers: Mapping[str, str], spec: InputSpec, limits: PayloadLimits) -> Batch:
    """Read one array of the NPY format, version 1, 2 or 3; pickled objects are refused unread.

    Raises:
        PayloadError: `malformed_body`, `wrong_dtype`, and what `canonical` raises.
    """
    shape, fortran_order, dtype, start = _npy_header(body)
    _check_dtype(dtype)
    if any(extent < 0 for extent in shape):
        raise PayloadError("malformed_body", f"the .npy header declares the negative shape {_brief(shape)}")
    declared, present = math.prod(shape) * dtype.itemsize, len(body) - start
    if declared != present:
        detail = f"the .npy header declares {declared} bytes ({dtype} {_brief(shape)}), the body holds {present}"
        raise PayloadError("malformed_body", detail)
    elements = _view(body, dtype, start)
    claim = Claim(elements, shape, headers.get(_LAYOUT_HEADER), order="F" if fortran_order else "C")
    return canonical(claim, spec, limits)


def _npy_header(body: bytes) -> tuple[tuple[int, ...], bool, np.dtype[Any], int]:
    stream = io.BytesIO(body)
    try:
        version = npy_format.read_magic(stream)
        # Version 3 differs from 2 only by UTF-8 in the field names of structured types, which are refused anyway.
        read = npy_format.read_array_header_1_0 if version == (1, 0) else npy_format.read_array_header_2_0
        shape, fortran_order, dtype = read(stream, max_header_size=_MAX_NPY_HEADER)
    except Exception as error:  # the header is a Python literal: NumPy's parsers leak many types of exception on junk
        detail = "the body is not a .npy file of version 1, 2 or 3, as numpy.save writes them"
        raise PayloadError("malformed_body", detail) from error
    return tuple(map(int, shape)), fortran_order, dtype, stream.tell()


def decode_raw(body: bytes, headers: Mapping[str, str], spec: InputSpec, limits: PayloadLimits) -> Batch:
    """Read a C-ordered little-endian tensor that the `X-Tensor-*` headers describe (names in lower case here).

    Raises:
        PayloadError: `invalid_request` for the headers, `wrong_dtype`, `wrong_shape` when the body has another size
            than they say, and what `canonical` raises.
    """
    shape, dtype = _declared_shape(headers), _declared_dtype(headers)
    declared = math.prod(shape) * dtype.itemsize
    if declared != len(body):
        detail = f"X-Tensor-Shape {_brief(shape)} of {dtype.name} is {declared} bytes, the body has {len(body)}"
        raise PayloadError("wrong_shape", detail)
    return canonical(Claim(_view(body, dtype), shape, headers.get(_LAYOUT_HEADER)), spec, limits)


def check_tensor_headers(headers: Mapping[str, str]) -> None:
    """Refuse `X-Tensor-*` headers (names in lower case) that describe no array, whatever the body beside them is.

    Raises:
        PayloadError: `invalid_request`, `wrong_dtype`.
    """
    if _SHAPE_HEADER in headers:
        _declared_shape(headers)
    _declared_dtype(headers)
    _check_layout(headers.get(_LAYOUT_HEADER))


def _view(body: bytes, dtype: np.dtype[Any], start: int = 0) -> NDArray[Any]:
    # Unlike np.frombuffer, this accepts an empty buffer.
    return np.ndarray((len(body) - start) // dtype.itemsize, dtype, buffer=body, offset=start)


def _declared_shape(headers: Mapping[str, str]) -> tuple[int, ...]:
    text = headers.get(_SHAPE_HEADER)
    if text is None:
        detail = "application/octet-stream needs the header X-Tensor-Shape, such as 20,28,28,1"
        raise PayloadError("invalid_request", detail)
    if not _SHAPE.fullmatch(text.strip()):
        detail = f"X-Tensor-Shape {text[:60]!r} is not 3 or 4 non-negative integers, such as 20,28,28,1"
        raise PayloadError("invalid_request", detail)
    return tuple(map(int, text.split(",")))


def _declared_dtype(headers: Mapping[str, str]) -> np.dtype[Any]:
    name = headers.get(_DTYPE_HEADER, "uint8")
    if name not in _RAW_DTYPES:
        detail = f"X-Tensor-Dtype {name[:20]!r} is not accepted; use {' or '.join(_RAW_DTYPES)}"
        raise PayloadError("wrong_dtype", detail)
    return _RAW_DTYPES[name]


RAW: Final = "application/octet-stream"
ARRAYS: Final = {"application/x-npy": decode_npy, RAW: decode_raw}
"""How bodies that are one array are read, by their media types. Names of headers are in lower case."""
