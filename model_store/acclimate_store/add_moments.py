"""Class moments of a user's own labelled source data, published as a new version of a bundle.

Only sums over images leave the loop; nothing about a single image is kept.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from acclimate_adapters.balanced.moments import layer_widths, source_moments
from acclimate_adapters.errors import ConfigurationError, InputError
from acclimate_store.bundle import Bundle
from acclimate_store.catalogue import BundleKey, Catalogue
from acclimate_store.errors import MomentsError
from acclimate_store.labelled import LabelledImages, labelled_images
from acclimate_store.versions import next_version, publish, renewed

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


def _batches(
    bundle: Bundle, images: LabelledImages, progress: Callable[[int, int], None]
) -> Iterator[tuple[Tensor, Tensor]]:
    done = 0
    for pixels, labels in images.batches(BATCH):
        yield bundle.prepare(pixels), torch.from_numpy(labels).to(bundle.model.device)
        done += len(labels)
        progress(done, images.rows)
