"""Binary arrays: `.npy` files and raw little-endian tensors. Neither reader allocates what a header merely claims."""

import io
import math
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.lib import format as npy_format
from numpy.typing import NDArray

from acclimate_store import InputSpec

from .arrays import Batch, Claim, brief, canonical, check_dtype
from .errors import PayloadError
from .limits import PayloadLimits

LAYOUT_HEADER = "x-tensor-layout"
SHAPE_HEADER = "x-tensor-shape"
DTYPE_HEADER = "x-tensor-dtype"

_RAW_DTYPES: dict[str, np.dtype[Any]] = {"uint8": np.dtype("u1"), "float32": np.dtype("<f4")}
_SHAPE = re.compile(r"[0-9]{1,10}( *, *[0-9]{1,10}){2,3}")
_MAX_NPY_HEADER = 1024  # NumPy writes 118 bytes for an unstructured array; its parser evaluates what it is given


def decode_npy(body: bytes, headers: Mapping[str, str], spec: InputSpec, limits: PayloadLimits) -> Batch:
    """Read one array of the NPY format, version 1, 2 or 3; pickled objects are refused unread.

    Raises:
        PayloadError: `malformed_body`, `wrong_dtype`, and what `canonical` raises.
    """
    shape, fortran_order, dtype, start = _npy_header(body)
    check_dtype(dtype)
    if any(extent < 0 for extent in shape):
        raise PayloadError("malformed_body", f"the .npy header declares the negative shape {brief(shape)}")
    declared, present = math.prod(shape) * dtype.itemsize, len(body) - start
    if declared != present:
        detail = f"the .npy header declares {declared} bytes ({dtype} {brief(shape)}), the body holds {present}"
        raise PayloadError("malformed_body", detail)
    elements = _view(body, dtype, start)
    claim = Claim(elements, shape, headers.get(LAYOUT_HEADER), order="F" if fortran_order else "C")
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
        detail = f"X-Tensor-Shape {brief(shape)} of {dtype.name} is {declared} bytes, the body has {len(body)}"
        raise PayloadError("wrong_shape", detail)
    return canonical(Claim(_view(body, dtype), shape, headers.get(LAYOUT_HEADER)), spec, limits)


def _view(body: bytes, dtype: np.dtype[Any], start: int = 0) -> NDArray[Any]:
    # Unlike np.frombuffer, this accepts an empty buffer.
    return np.ndarray((len(body) - start) // dtype.itemsize, dtype, buffer=body, offset=start)


def _declared_shape(headers: Mapping[str, str]) -> tuple[int, ...]:
    text = headers.get(SHAPE_HEADER)
    if text is None:
        detail = "application/octet-stream needs the header X-Tensor-Shape, such as 20,28,28,1"
        raise PayloadError("invalid_request", detail)
    if not _SHAPE.fullmatch(text.strip()):
        detail = f"X-Tensor-Shape {text[:60]!r} is not 3 or 4 non-negative integers, such as 20,28,28,1"
        raise PayloadError("invalid_request", detail)
    return tuple(map(int, text.split(",")))


def _declared_dtype(headers: Mapping[str, str]) -> np.dtype[Any]:
    name = headers.get(DTYPE_HEADER, "uint8")
    if name not in _RAW_DTYPES:
        detail = f"X-Tensor-Dtype {name[:20]!r} is not accepted; use {' or '.join(_RAW_DTYPES)}"
        raise PayloadError("wrong_dtype", detail)
    return _RAW_DTYPES[name]
