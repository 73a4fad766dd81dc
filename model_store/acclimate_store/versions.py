"""New versions of a bundle, made from a published one, which itself never changes; and versions that are to go."""

import re
import secrets
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from acclimate_adapters import FrozenModel, Source
from acclimate_store.architectures import build
from acclimate_store.bundle import write_files
from acclimate_store.catalogue import BundleKey, Catalogue
from acclimate_store.errors import BundleError, BundleExists, ManifestError
from acclimate_store.files import GRAPHS, SOURCE_FILE, SOURCE_RECORD_FILE, load_weights
from acclimate_store.manifest import Manifest
from acclimate_store.sources import encode_source


def next_version(newest: BundleKey) -> str:
    """The version with its last number raised by one.

    Raises:
        ManifestError: it ends in no number.
    """
    found = re.fullmatch(r"(.*?)(\d+)", newest.version or "")
    if found is None:
        raise ManifestError(f"{newest} ends in no number that could be raised; name the new version with --as VERSION")
    return f"{found[1]}{int(found[2]) + 1}"


def renewed(catalogue: Catalogue, manifest: Manifest, new: BundleKey, made: str, **changes: Any) -> Manifest:
    """The manifest of a new version, which says how it was made; to be asked for before any long work.

    Raises:
        ManifestError: the version has no name that it may have.
        BundleExists: it is published already.
    """
    told = {"version": new.version, "provenance": f"{manifest.provenance} {made}", **changes}
    changed = Manifest.from_json(manifest.model_copy(update=told).to_json())
    if catalogue.directory(new).exists():
        raise BundleExists(f"{new} is published already and never changes; name another version")
    return changed


def model_with(catalogue: Catalogue, key: BundleKey, source: Source) -> FrozenModel:
    """The network of a bundle, on the CPU, with another source."""
    manifest = catalogue.manifest(*key)
    net = build(manifest.architecture, manifest.architecture_options, catalogue.allowed_imports)
    load_weights(net, catalogue.directory(key))
    return FrozenModel.from_module(net, classifier=manifest.classifier, source=source)


def publish(
    catalogue: Catalogue, origin: BundleKey, manifest: Manifest, source: Source, graphs: Mapping[str, bytes | Path]
) -> None:
    """Write the bundle of a manifest with the files of its origin, which are shared and not copied, and a new source.

    Graphs of the origin are left out, since they are of a model with its source.
    """
    directory = catalogue.directory(origin)
    left_out = {SOURCE_FILE, SOURCE_RECORD_FILE, *GRAPHS}
    kept = {file: directory / file for file in manifest.files if file not in left_out}
    contents: dict[str, bytes | Path] = {**kept, **encode_source(source), **graphs}
    write_files(catalogue.root, manifest, contents, catalogue.allowed_imports)


def remove(catalogue: Catalogue, key: BundleKey) -> None:
    """Take a version out of the store: at once for whoever looks. Files that other versions share stay with them.

    Raises:
        BundleError: the file system does not allow it.
    """
    directory = catalogue.directory(key)
    hidden = directory.with_name(f".{directory.name}-{secrets.token_hex(4)}")  # from the catalogue, while it goes
    try:
        directory.rename(hidden)
        shutil.rmtree(hidden)
        if not any(directory.parent.iterdir()):
            directory.parent.rmdir()
    except OSError as error:
        raise BundleError(f"{key} cannot be removed: {error}") from error
