"""States as fewer bytes: every part of a tensor at as many bits as its error matters.

A coded state is a `State` too, whose adapter is named `coded.3:<name>`, so that nobody takes it for the state itself:
its tensors are those that stay as they are, the codes of the others one after another, and a table of these, JSON that
is compressed by bzip2, which gives the same bytes everywhere. With small budgets, matrices are sums of their leading
terms, whose columns and rows are rounded instead of their numbers. The 3 is the version of the form: in the earlier
ones the table was not compressed.

Why it rounds stochastically. What is restored goes on: it is stepped, and stored again. The step of a mean over k
batches is of the order of 1/k, soon less than half a rounding step, and rounding to the nearest would undo each of
them: the mean would stop following the client. A random part of a step, added before rounding down, lets through each
change in proportion; the mean error is 0 however often a state is stored. Its scales being powers of two, a restored
number lies on the same steps when it is stored again, and only what changed is rounded, so that the variance stays
bounded too: with a step d and changes c / k it tends to d c / 2. The random numbers come from the number of batches:
equal states are equal bytes on every replica.
"""

import bz2
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Final

import numpy as np
import torch
from torch import Tensor

from acclimate_adapters.compression import rounding
from acclimate_adapters.compression.allocation import LEVELS, PART, Measured, Product, allocate, measure
from acclimate_adapters.compression.terms import leading
from acclimate_adapters.errors import StateCorrupt
from acclimate_adapters.state import State

_FORM: Final = "coded.3:"
_EARLIER: Final = ("coded.1:", "coded.2:")
FEW: Final = 1 / 8
"""Budget below which matrices are stored by their leading terms; rounding is as good from there on."""
ONE_WAY: Final = 1 / 3
"""Times the root of a matrix' smaller side: how much more an error in one term counts than one of the same size that is
spread over all numbers. Dropping one matrix of a trained ResNet-18 changes the predicted probabilities by 0.35 to 0.65
of that root for 16 of its 21, noise in a running mean by 0.06 to 0.37, each by root mean square times weight; and what
is dropped counts tenfold already (`allocation`)."""
_TABLE, _CODES = "coded:table", "coded:codes"


def encode(state: State, budget: float, weights: Mapping[str, float]) -> bytes:
    """Serialise; equal states give equal bytes, whatever the order of their tensors.

    Tensors of another type than float32, and those with numbers that are not finite or above 2^56, stay exact.

    Args:
        state: what to store.
        budget: share of their exact bytes that the tensors with a weight may take, above 0; from 1 on the state is
            stored as `State.to_bytes` does it. Those of infinite weight take half of theirs whatever the share is. The
            table adds some 10 bytes for each tensor.
        weights: `sensitivity` of its adapter.
    """
    named = sorted(state.tensors.items())
    coded = {name: t for name, t in named if name in weights and t.dtype is torch.float32 and t.numel()}
    if budget >= 1 or not coded:
        return state.to_bytes()
    pieces = {name: _pieces(tensor, weights[name], budget, state.step) for name, tensor in coded.items()}
    measured = [each for of_one in pieces.values() for each in of_one]
    shared = sum(tensor.nbytes for name, tensor in coded.items() if math.isfinite(weights[name]))
    bits = allocate(measured, int(budget * shared))
    left, dither, codes, table = iter(bits), rounding.Dither(state.step), bytearray(), dict[str, list[object]]()
    for name, of_one in pieces.items():
        vectors = [each for piece in of_one for each in _levels(piece, next(left))]
        for vector, parts in vectors:
            codes += b"".join(_encoded(vector, parts, dither))
        table[name] = [[*coded[name].shape], _spelt([parts for _, parts in vectors])]
    kept = {name: tensor for name, tensor in state.tensors.items() if name not in coded}
    told = bytearray(bz2.compress(json.dumps(table).encode()))
    tensors = kept | {_TABLE: _bytes_as_tensor(told), _CODES: _bytes_as_tensor(codes)}
    return State(_FORM + state.adapter, state.layout, state.model, state.step, tensors).to_bytes()


def decode(data: bytes) -> State:
    """Read what `encode` or `State.to_bytes` wrote; the tensors are on the CPU.

    Raises:
        StateCorrupt: the bytes are not a state.
    """
    state = State.from_bytes(data)
    form = next((form for form in (_FORM, *_EARLIER) if state.adapter.startswith(form)), None)
    if form is None:
        return state
    try:
        told = state.tensors[_TABLE].numpy().tobytes()
        table = json.loads(bz2.decompress(told) if form == _FORM else told)
        decoded = _decoded(table, state.tensors[_CODES].numpy().data)
    except (
        OSError,
        ValueError,
        KeyError,
        TypeError,
        IndexError,
        ArithmeticError,
        AttributeError,
        RuntimeError,
    ) as error:
        raise StateCorrupt(f"these bytes are not a coded state: {error}") from error
    kept = {name: tensor for name, tensor in state.tensors.items() if name not in (_TABLE, _CODES)}
    return State(state.adapter.removeprefix(form), state.layout, state.model, state.step, kept | decoded)


def _numbers(tensor: Tensor) -> rounding.Floats:
    numbers: rounding.Floats = tensor.detach().cpu().contiguous().reshape(-1).numpy()
    return numbers


def _pieces(tensor: Tensor, weight: float, budget: float, seed: int) -> Sequence[Measured | Product]:
    """What is stored of a tensor: all its numbers or, with few bytes, columns and rows of the terms of a matrix.

    The product of a term is off by the error of its column times the length of its row, and the other way round; both
    are as long as the root of its size. Such an error, or a term that is missing, points one way for all that comes
    into the layer, and counts for more (`ONE_WAY`).
    """
    whole = measure(_numbers(tensor), weight)
    if budget >= FEW or tensor.ndim < 2 or tensor.numel() <= PART or whole.least:
        return [whole]
    matrix = whole.x.reshape(tensor.shape[0], -1)
    height, width = matrix.shape
    one_way = weight * ONE_WAY * math.sqrt(min(height, width))
    return [
        Product(
            measure(term.column, one_way * math.sqrt(term.size / width), coarse=False),
            measure(term.row, one_way * math.sqrt(term.size / height), coarse=False),
        )
        for term in leading(matrix, seed)
    ]


def _levels(piece: Measured | Product, bits: list[int]) -> list[tuple[Measured, list[int]]]:
    """The bits of each part of each vector."""
    if isinstance(piece, Measured):
        return [(piece, bits)]
    return [(vector, bits * vector.parts) for vector in (piece.column, piece.row)]


def _spelt(bits: list[list[int]]) -> str | list[str]:
    """The levels of a whole tensor, or those of each vector of its terms up to the last that is stored."""
    if len(bits) == 1:
        return _spell(bits[0])
    stored = max((number + 1 for number, parts in enumerate(bits) if any(parts)), default=0)
    return [_spell(parts) for parts in bits[:stored]]


def _encoded(tensor: Measured, bits: Sequence[int], dither: rounding.Dither) -> Iterator[bytes]:
    for level, first, last in _stretches(bits, len(tensor.x)):
        maxima = tensor.maxima[first // rounding.BLOCK : -(-last // rounding.BLOCK)]
        yield rounding.encode(tensor.x[first:last], maxima, level, dither)


def _decoded(table: Mapping[str, tuple[list[int], str | list[str]]], codes: memoryview) -> dict[str, Tensor]:
    tensors, at = dict[str, Tensor](), 0
    for name, (shape, spelt) in table.items():
        n = math.prod(shape)
        if isinstance(spelt, str):
            numbers, at = _read(name, spelt, n, codes, at)
        else:
            numbers, height = np.zeros(n, np.float32), shape[0]
            for column_bits, row_bits in zip(spelt[::2], spelt[1::2], strict=True):
                column, at = _read(name, column_bits, height, codes, at)
                row, at = _read(name, row_bits, n // height, codes, at)
                with np.errstate(all="ignore"):  # codes that are damaged may be any numbers
                    numbers += np.outer(column, row).reshape(-1)
        tensors[name] = torch.from_numpy(numbers).reshape(shape)
    if at != len(codes):
        raise ValueError(f"there are {len(codes)} bytes of codes, not {at}")
    return tensors


def _read(name: str, spelt: str, n: int, codes: memoryview, at: int) -> tuple[rounding.Floats, int]:
    """So many numbers from a place on, and the place after them."""
    bits = [LEVELS[int(digit)] for digit in spelt]
    if len(bits) != -(-n // PART):
        raise ValueError(f"{name} of {n} numbers has not {len(bits)} parts")
    numbers = np.empty(n, np.float32)
    for level, first, last in _stretches(bits, n):
        end = at + rounding.nbytes(last - first, level)
        rounding.decode(codes[at:end], level, numbers[first:last])
        at = end
    return numbers, at


def _stretches(bits: Sequence[int], n: int) -> Iterator[tuple[int, int, int]]:
    """Level, first and last number (exclusive) of neighbouring parts that share a level."""
    part = 0
    for level, group in groupby(bits):
        first, part = part, part + len([*group])
        yield level, first * PART, min(part * PART, n)


def _spell(bits: Sequence[int]) -> str:
    """One digit for each part."""
    return "".join(str(LEVELS.index(each)) for each in bits)


def _bytes_as_tensor(data: bytearray) -> Tensor:
    return torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
