"""The files of a bundle: their names and hashes, and the named tensors in them."""

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor, nn

from acclimate_store.errors import IntegrityError, TensorError
from acclimate_store.manifest import MANIFEST_FILE, Manifest

MODEL_FILE = "model.safetensors"
SOURCE_FILE = "source.safetensors"
SOURCE_RECORD_FILE = "source.json"
REQUIRED_FILES = (MODEL_FILE, SOURCE_FILE, SOURCE_RECORD_FILE)
GOLDEN_FILE = "golden.safetensors"
FROZEN_GRAPH = "frozen.onnx"
STEM_GRAPH, BALANCED_GRAPH, BLENDED_GRAPH = "balanced_stem.onnx", "balanced.onnx", "bn_adapt.onnx"
GRAPHS = (FROZEN_GRAPH, STEM_GRAPH, BALANCED_GRAPH, BLENDED_GRAPH)
"""Files that a bundle may have: the passes of its very model for ONNX Runtime."""


def check_files(directory: Path, manifest: Manifest) -> None:
    """Compare a bundle's directory with its manifest.

    Raises:
        IntegrityError: every file that is missing, changed, unlisted or not a regular file.
    """
    problems = list(_file_problems(directory, manifest))
    if problems:
        raise IntegrityError(f"{directory} is damaged; fetch or publish {manifest.key} again:", problems)


def missing_file(file: str) -> str:
    """The message about a missing file, the same whoever notices it first."""
    return f"{file} is missing"


def _file_problems(directory: Path, manifest: Manifest) -> Iterator[str]:
    for file in REQUIRED_FILES:
        if file not in manifest.files:
            yield f"{MANIFEST_FILE} does not list {file}"
    for file, digest in manifest.files.items():
        path = directory / file
        if not path.exists():
            yield missing_file(file)
        elif not path.is_file() or sha256(path) != digest:
            yield f"{file} differs from its sha256 in {MANIFEST_FILE}"
    for path in sorted(directory.rglob("*")):
        name = path.relative_to(directory).as_posix()
        if path.is_symlink():
            yield f"{name} is a link; a bundle holds its files itself"
        elif not path.is_dir() and name not in {MANIFEST_FILE, *manifest.files}:
            yield f"{name} is not listed in {MANIFEST_FILE}"


def sha256(content: bytes | Path) -> str:
    """The hash of some bytes, or of a file."""
    if isinstance(content, bytes):
        return hashlib.sha256(content).hexdigest()
    with content.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def encode_tensors(tensors: Mapping[str, Tensor]) -> bytes:
    """Safetensors bytes; every tensor is copied to the CPU, since the format knows no shared memory."""
    return save({name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()})


def read_tensors(directory: Path, file: str, device: torch.device | str = "cpu") -> dict[str, Tensor]:
    """Read a safetensors file of a bundle.

    Raises:
        IntegrityError: there is no such file.
        TensorError: it is no safetensors file.
    """
    path = directory / file
    if not path.is_file():
        raise IntegrityError(missing_file(file))
    try:
        return load_file(path, device=str(device))
    except SafetensorError as error:
        raise TensorError(f"{file} is not a safetensors file: {error}") from error


def load_weights(net: nn.Module, directory: Path) -> None:
    """Fill a network with the weights of a bundle.

    Raises:
        IntegrityError: there are no weights.
        TensorError: every tensor that is missing, unknown, misshaped, of another type or not finite.
    """
    found, state = read_tensors(directory, MODEL_FILE), net.state_dict()
    problems = [f"{MODEL_FILE}: {problem}" for problem in _misfits(state, found)]
    if problems:
        raise TensorError(f"{MODEL_FILE} does not fit the architecture:", problems)
    state.update(found)  # and not `found` itself: layers look for the version numbers that only a state dict carries
    net.load_state_dict(state)


def non_finite(tensors: Mapping[str, Tensor]) -> Iterator[str]:
    """One line for each tensor that holds NaN or infinite numbers."""
    for name, tensor in tensors.items():
        if not bool(torch.isfinite(tensor).all()):
            yield f"{name} holds non-finite numbers"


def _misfits(expected: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> Iterator[str]:
    for name in sorted(expected.keys() - found.keys()):
        yield f"{name} is missing"
    for name in sorted(found.keys() - expected.keys()):
        yield f"{name} is unknown to the architecture"
    for name in sorted(expected.keys() & found.keys()):
        wanted, given = _kind(expected[name]), _kind(found[name])
        if wanted != given:
            yield f"{name} is {given}, the architecture has {wanted}"
    yield from non_finite(found)


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
