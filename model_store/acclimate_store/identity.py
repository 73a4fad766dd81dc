"""What the states of clients depend on: the identity of a version, and beside it the quantities that adapters read.

A state is of use under another version if that has the same identity, and the same of each quantity that the state's
adapter reads.
"""

import hashlib
import json
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final, Self

import torch

from acclimate_adapters import Source
from acclimate_adapters.network.freezing import content_hash
from acclimate_store.files import MODEL_FILE, read_tensors
from acclimate_store.manifest import Manifest
from acclimate_store.sources import read_source

PARTS: Final = ("weights", "architecture", "classifier", "input", "classes")
"""Of an identity: each decides what an answer is or means."""


@dataclass(frozen=True)
class Identity:
    """A version, as far as states depend on it.

    Args:
        name, version: of the bundle.
        content: content hash of the frozen model (16 hex digits).
        parts: digest of each of `PARTS`.
        quantities: digest of each quantity of the source that is there.
    """

    name: str
    version: str
    content: str
    parts: Mapping[str, str]
    quantities: Mapping[str, str]

    @property
    def bundle(self) -> str:
        """`name/version`."""
        return f"{self.name}/{self.version}"

    @cached_property
    def digest(self) -> str:
        """16 hex digits over all parts."""
        return _digest([self.parts[part] for part in PARTS])

    def differing(self, other: "Identity") -> tuple[str, ...]:
        """Parts in which two versions differ; none if they are one model."""
        return tuple(part for part in PARTS if self.parts[part] != other.parts[part])

    def changed(self, other: "Identity", needs: Collection[str]) -> tuple[str, ...]:
        """Which of the quantities that an adapter needs differ, sorted; what else it needs follows from the parts."""
        return tuple(sorted(name for name in needs if self.quantities.get(name) != other.quantities.get(name)))

    def to_json(self) -> str:
        """Text that `from_json` reads back; one version, one text."""
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """What `to_json` wrote; raises ValueError, KeyError or TypeError for anything else."""
        return cls(**json.loads(text))


def identity_of(manifest: Manifest, content: str, source: Source) -> Identity:
    """The identity of a version whose content hash and source are known."""
    parts = {
        "weights": manifest.files[MODEL_FILE],
        "architecture": _digest([manifest.architecture, dict(manifest.architecture_options)]),
        "classifier": manifest.classifier or "",
        "input": _digest(manifest.input.model_dump(mode="json")),
        "classes": _digest(list(manifest.classes)),
    }
    return Identity(manifest.name, manifest.version, content, parts, _quantities(source))


def read_identity(directory: Path, manifest: Manifest) -> Identity:
    """The identity of a version from its files, without its network.

    Raises:
        BundleError: a file is missing or malformed.
    """
    source = read_source(directory, manifest.input)
    content = content_hash(read_tensors(directory, MODEL_FILE), manifest.classifier, source)
    return identity_of(manifest, content, source)


def _quantities(source: Source) -> dict[str, str]:
    hashes = {name: hashlib.sha256() for name in source.present}
    for name, tensor in sorted(source.tensors().items()):
        digest = hashes[name.partition(".")[0]]
        digest.update(f"|{name}|{tensor.dtype}|{[*tensor.shape]}|".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    for name, rate in sorted((source.rates or {}).items()):
        hashes["rates"].update(f"|{name}|{float(rate).hex()}|".encode())
    return {name: digest.hexdigest()[:16] for name, digest in sorted(hashes.items())}


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]
