"""New versions of a bundle, made from a published one, which itself never changes."""

import re
from collections.abc import Mapping

from acclimate_adapters import Source
from acclimate_store.architectures import build
from acclimate_store.bundle import write_bundle
from acclimate_store.catalogue import BundleKey, Catalogue
from acclimate_store.errors import BundleExists, ManifestError
from acclimate_store.files import GRAPHS, REQUIRED_FILES, load_weights
from acclimate_store.manifest import Manifest


def next_version(newest: BundleKey) -> str:
    """The version with its last number raised by one.

    Raises:
        ManifestError: it ends in no number.
    """
    found = re.fullmatch(r"(.*?)(\d+)", newest.version or "")
    if found is None:
        raise ManifestError(f"{newest} ends in no number that could be raised; name the new version with --as VERSION")
    return f"{found[1]}{int(found[2]) + 1}"


def renewed(catalogue: Catalogue, manifest: Manifest, new: BundleKey, made: str) -> Manifest:
    """The manifest of a new version, which says how it was made; to be asked for before any long work.

    Raises:
        ManifestError: the version has no name that it may have.
        BundleExists: it is published already.
    """
    changes = {"version": new.version, "provenance": f"{manifest.provenance} {made}"}
    changed = Manifest.from_json(manifest.model_copy(update=changes).to_json())
    if catalogue.directory(new).exists():
        raise BundleExists(f"{new} is published already and never changes; name another version")
    return changed


def publish(
    catalogue: Catalogue, origin: BundleKey, manifest: Manifest, source: Source, graphs: Mapping[str, bytes]
) -> None:
    """Write the bundle of a manifest with the network and the files of its origin, but other graphs.

    Those of the origin are left out, since they are of a model with its source.
    """
    directory, trusted = catalogue.directory(origin), catalogue.allowed_imports
    net = build(manifest.architecture, manifest.architecture_options, trusted)
    load_weights(net, directory)
    others = [file for file in manifest.files if file not in (*REQUIRED_FILES, *GRAPHS)]
    extra = {file: (directory / file).read_bytes() for file in others}
    write_bundle(catalogue.root, manifest, net, source, extra={**extra, **graphs}, allowed_imports=trusted)
