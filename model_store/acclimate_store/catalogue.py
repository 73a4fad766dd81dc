"""The bundles of a store: `<root>/<name>/<version>/`."""

import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from packaging.version import InvalidVersion, Version

from acclimate_store.bundle import Bundle, inspect_bundle, load_bundle, read_manifest
from acclimate_store.errors import BundleError, BundleNotFound, ManifestError
from acclimate_store.files import MODEL_FILE, read_tensors
from acclimate_store.manifest import MANIFEST_FILE, Default, Manifest, is_bare_name
from acclimate_store.runtimes import Choice
from acclimate_store.sources import read_source


class BundleKey(NamedTuple):
    """Which bundle; without a version the newest one."""

    name: str
    version: str | None = None

    def __str__(self) -> str:
        return self.name if self.version is None else f"{self.name}/{self.version}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read `name` or `name/version`.

        Raises:
            BundleNotFound: anything else, which therefore names no bundle.
        """
        name, slash, version = text.partition("/")
        if not is_bare_name(name) or (slash and not is_bare_name(version)):
            raise BundleNotFound(f"{text!r} names no bundle; write name or name/version, as in fashion-cnn/1")
        return cls(name, version or None)


@dataclass(frozen=True, slots=True)
class Catalogue:
    """Finds, checks and loads bundles.

    Args:
        root: the store's directory.
        allowed_imports: architectures `module:callable` that the operator trusts, beside the registered ones.
    """

    root: Path
    allowed_imports: Collection[str] = ()

    def list(self) -> tuple[BundleKey, ...]:
        """All bundles, by name and then from the oldest version to the newest.

        Raises:
            BundleNotFound: the store itself is not there.
        """
        if not self.root.is_dir():
            raise BundleNotFound(
                f"there is no model store at {self.root}; `acclimate models create` makes it, as <name>/<version>/"
            )
        found = (
            BundleKey(path.parent.parent.name, path.parent.name) for path in self.root.glob(f"*/*/{MANIFEST_FILE}")
        )
        valid = (key for key in found if is_bare_name(key.name) and is_bare_name(key.version or ""))
        return tuple(sorted(valid, key=lambda key: (key.name, age(key.version or ""))))

    def resolve(self, name: str, version: str | None = None) -> BundleKey:
        """The key of a bundle that exists; without a version that of the newest.

        Raises:
            BundleNotFound: no such name or version.
        """
        known = self.list()
        versions = [key for key in known if key.name == name and version in (None, key.version)]
        if not versions:
            there = ", ".join(map(str, known)) or "nothing"
            raise BundleNotFound(f"there is no {BundleKey(name, version)} in {self.root}; it holds {there}")
        return versions[-1]

    def manifest(self, name: str, version: str | None = None) -> Manifest:
        """The manifest of a bundle, without a version of the newest.

        Raises:
            BundleNotFound: no such name or version.
            ManifestError: the manifest is malformed, or speaks of another bundle than its folder.
        """
        key = self.resolve(name, version)
        manifest = read_manifest(self.directory(key))
        if manifest.key != str(key):
            raise ManifestError(f"the manifest in folder {key} is that of {manifest.key}; restore the folder's name")
        return manifest

    def default(self, name: str, version: str | None = None) -> Default:
        """The adapter of clients that choose none, without a version that of the newest, as `Bundle.default`.

        No network is built, so that it can be told of one whose code is not trusted: only BatchNorm layers have class
        moments, and a linear classifier has a matrix of weights.

        Raises:
            BundleNotFound: no such name or version.
            BundleError: a file is missing or malformed.
        """
        manifest = self.manifest(name, version)
        directory = self.directory(BundleKey(manifest.name, manifest.version))
        moments = read_source(directory, manifest.input).moments
        linear = False
        if manifest.classifier is not None:
            weight = read_tensors(directory, MODEL_FILE).get(f"{manifest.classifier}.weight")
            linear = weight is not None and weight.dim() == 2
        return manifest.default(servable=bool(moments) and linear)

    def load(
        self,
        name: str,
        version: str | None = None,
        device: torch.device | str = "cpu",
        runtime: Choice = "torch",
    ) -> Bundle:
        """Verify and load a bundle; see `load_bundle` for what can be wrong with it.

        Raises:
            BundleNotFound: no such name or version.
            BundleError: the bundle must not be served.
        """
        manifest = self.manifest(name, version)
        directory = self.directory(BundleKey(manifest.name, manifest.version))
        return load_bundle(directory, device, self.allowed_imports, runtime)

    def verify(self, name: str, version: str | None = None) -> tuple[str, ...]:
        """Everything that is wrong with a bundle, not only the first thing; empty when it may be served.

        Raises:
            BundleNotFound: no such name or version.
        """
        key = self.resolve(name, version)
        try:
            self.manifest(*key)
        except BundleError as error:
            return error.problems
        return inspect_bundle(self.directory(key), self.allowed_imports)

    def directory(self, key: BundleKey) -> Path:
        """Where a bundle with a version is, or would be."""
        return self.root / key.name / (key.version or "")


def age(version: str) -> tuple[Any, ...]:
    """Sort key from the oldest version to the newest: by PEP 440, in which 1.10 is newer than 1.9, and 2 than 2rc1.

    What is no version in its sense is older than all that are, and ordered by its numbers and the text between them.
    """
    try:
        return True, Version(version), version
    except InvalidVersion:
        # Splitting at digits puts text at even and numbers at odd places: like is always compared with like.
        parts = tuple(int(part) if part.isdigit() else part for part in re.split(r"(\d+)", version))
        return False, parts, version
