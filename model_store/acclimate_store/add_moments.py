"""Class moments of a user's own labelled source data, published as a new version of a bundle.

Only sums over images leave the loop; nothing about a single image is kept.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from acclimate_adapters import Source
from acclimate_adapters.errors import ConfigurationError, InputError
from acclimate_adapters.moments import layer_widths, source_moments
from acclimate_store.architectures import build
from acclimate_store.bundle import Bundle, write_bundle
from acclimate_store.catalogue import BundleKey, Catalogue
from acclimate_store.errors import BundleExists, MomentsError
from acclimate_store.integrity import GRAPHS, REQUIRED_FILES
from acclimate_store.labelled import LabelledImages, labelled_images
from acclimate_store.manifest import Manifest
from acclimate_store.tensors import load_weights

BATCH = 128  # images per pass


def add_moments(
    catalogue: Catalogue, key: BundleKey, data: Path, version: str | None, progress: Callable[[int, int], None]
) -> BundleKey:
    """Measure the class moments that `balanced` needs and publish the bundle with them, which replace any it had.

    Args:
        catalogue: of the store.
        key: the bundle; without a version the newest.
        data: .npz file of labelled source images, as `LabelledImages`.
        version: of the new bundle; by default the next one after the newest.
        progress: told the images measured so far, and how many there are.

    Returns:
        The key of the new bundle.

    Raises:
        BundleError: there is no such bundle, no use for moments, or something is wrong with the data.
    """
    key = catalogue.resolve(*key)
    new = BundleKey(key.name, version or next_version(catalogue.resolve(key.name)))
    bundle = catalogue.load(*key)
    if not layer_widths(bundle.model):
        raise MomentsError(
            f"{key} has no BatchNorm layer with running statistics, so there is nothing to add: "
            "'balanced' corrects its class prior and needs no moments for that"
        )
    images = labelled_images(data, bundle.manifest.input.shape)
    made = f"Class moments of {key} measured on {images.rows} labelled images of {images.path.name}."
    manifest = renewed(catalogue, bundle.manifest, new, made)
    try:
        moments = source_moments(bundle.model, _batches(bundle, images, progress))
    except (ConfigurationError, InputError) as error:
        raise MomentsError(f"{data}: {error}") from error
    publish(catalogue, key, manifest, replace(bundle.model.source, moments=moments), {})
    return new


def next_version(newest: BundleKey) -> str:
    """The version with its last number raised by one.

    Raises:
        MomentsError: it ends in no number.
    """
    found = re.fullmatch(r"(.*?)(\d+)", newest.version or "")
    if found is None:
        raise MomentsError(f"{newest} ends in no number that could be raised; name the new version with --as VERSION")
    return f"{found[1]}{int(found[2]) + 1}"


def _batches(
    bundle: Bundle, images: LabelledImages, progress: Callable[[int, int], None]
) -> Iterator[tuple[Tensor, Tensor]]:
    done = 0
    for pixels, labels in images.batches(BATCH):
        yield bundle.prepare(pixels), torch.from_numpy(labels).to(bundle.model.device)
        done += len(labels)
        progress(done, images.rows)


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
