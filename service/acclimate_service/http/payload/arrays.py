"""Number arrays to the canonical batch, whichever body they came in."""

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from acclimate_store import InputSpec

from .errors import PayloadError
from .limits import PayloadLimits

Batch = NDArray[np.uint8] | NDArray[np.float32]

LAYOUTS = ("NHWC", "NCHW", "NHW")
ACCEPTED_DTYPES = "uint8 (0..255) or float32 (0..1)"

_DTYPES = tuple(map(np.dtype, ("uint8", "float16", "float32", "float64")))
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
        [B, C, H, W], C-contiguous, writable and sharing no memory with the claim; uint8 stays uint8, floats of any
        width become float32.

    Raises:
        PayloadError: `wrong_dtype`, `empty_batch`, `too_many_images`, `invalid_request`, `wrong_shape`,
            `ambiguous_layout`, `non_finite`, `out_of_range`.
    """
    check_dtype(claim.elements.dtype)
    if claim.shape:
        limits.check_count(claim.shape[0])
    layout = _resolve_layout(claim, spec)
    array = claim.elements.reshape(claim.shape, order=claim.order)
    if array.dtype == np.uint8:
        return np.array(_channels_first(array, layout), dtype=np.uint8, order="C")
    _check_floats(array)
    return np.array(_channels_first(array, layout), dtype=np.float32, order="C")


def brief(shape: tuple[int, ...]) -> str:
    """A shape for a message, cut where it is absurd."""
    return str(list(shape))[:80]


def check_dtype(dtype: np.dtype[Any]) -> None:
    """Refuse all element types but uint8, float16, float32 and float64, in either byte order.

    Raises:
        PayloadError: `wrong_dtype`.
    """
    if dtype.hasobject:
        detail = f"object arrays are pickled and never read; send {ACCEPTED_DTYPES}"
        raise PayloadError("wrong_dtype", detail)
    if dtype.newbyteorder("=") not in _DTYPES:
        raise PayloadError("wrong_dtype", f"{str(dtype)[:40]} is not accepted; send {ACCEPTED_DTYPES}")


def _resolve_layout(claim: Claim, spec: InputSpec) -> str:
    layout = claim.layout
    if layout is not None and layout not in LAYOUTS:
        raise PayloadError(
            "invalid_request", f"layout {layout[:20]!r} is not accepted; use one of {', '.join(LAYOUTS)}"
        )
    accepted = _accepted_shapes(spec)
    fits = [name for name, extent in accepted.items() if claim.shape[1:] == extent and layout in (None, name)]
    if not fits:
        raise PayloadError("wrong_shape", _misfit(claim, accepted))
    if len(fits) > 1:
        detail = f"shape {brief(claim.shape)} fits {' and '.join(fits)}; state the layout"
        raise PayloadError("ambiguous_layout", detail)
    return fits[0]


def _accepted_shapes(spec: InputSpec) -> dict[str, tuple[int, ...]]:
    channels, height, width = spec.channels, spec.height, spec.width
    shapes: dict[str, tuple[int, ...]] = {"NHWC": (height, width, channels), "NCHW": (channels, height, width)}
    if channels == 1:
        shapes["NHW"] = (height, width)
    return shapes


def _misfit(claim: Claim, accepted: dict[str, tuple[int, ...]]) -> str:
    stated = "" if claim.layout is None else f" with layout {claim.layout}"
    wanted = " or ".join(f"{name} [B, {', '.join(map(str, extent))}]" for name, extent in accepted.items())
    return f"the array has shape {brief(claim.shape)}{stated}; the model takes {wanted}"


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
