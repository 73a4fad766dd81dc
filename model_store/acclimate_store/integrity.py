"""The files of a bundle are exactly those its manifest lists, byte for byte."""

import hashlib
from collections.abc import Iterator
from pathlib import Path

from acclimate_store.errors import IntegrityError
from acclimate_store.manifest import MANIFEST_FILE, Manifest

MODEL_FILE = "model.safetensors"
SOURCE_FILE = "source.safetensors"
SOURCE_RECORD_FILE = "source.json"
REQUIRED_FILES = (MODEL_FILE, SOURCE_FILE, SOURCE_RECORD_FILE)
FROZEN_GRAPH = "frozen.onnx"
STEM_GRAPH, BALANCED_GRAPH = "balanced_stem.onnx", "balanced.onnx"
GRAPHS = (FROZEN_GRAPH, STEM_GRAPH, BALANCED_GRAPH)
"""Files that a bundle may have: the passes of its very model for ONNX Runtime."""


def check_files(directory: Path, manifest: Manifest) -> None:
    """Compare a bundle's directory with its manifest.

    Raises:
        IntegrityError: every file that is missing, changed, unlisted or not a regular file.
    """
    problems = list(_problems(directory, manifest))
    if problems:
        raise IntegrityError(f"{directory} is damaged; fetch or publish {manifest.key} anew:", problems)


def missing(file: str) -> str:
    """How a missing file is reported, whoever notices it first."""
    return f"{file} is missing"


def _problems(directory: Path, manifest: Manifest) -> Iterator[str]:
    for file in REQUIRED_FILES:
        if file not in manifest.files:
            yield f"{MANIFEST_FILE} does not list {file}"
    for file, digest in manifest.files.items():
        path = directory / file
        if not path.exists():
            yield missing(file)
        elif not path.is_file() or _sha256(path) != digest:
            yield f"{file} differs from its sha256 in {MANIFEST_FILE}"
    for path in sorted(directory.rglob("*")):
        name = path.relative_to(directory).as_posix()
        if path.is_symlink():
            yield f"{name} is a link; a bundle holds its files itself"
        elif not path.is_dir() and name not in {MANIFEST_FILE, *manifest.files}:
            yield f"{name} is not listed in {MANIFEST_FILE}"


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
