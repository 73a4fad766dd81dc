"""The golden batch of a bundle: a few images, and the logits that they had where it was published.

A version serves only where it answers them so again: another device, library, runtime or layer may not change what it
says.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Final

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from acclimate_adapters import FrozenModel
from acclimate_store.errors import GoldenError, TensorError
from acclimate_store.files import GOLDEN_FILE, encode_tensors, read_tensors
from acclimate_store.manifest import InputSpec, Manifest

_GRAINS: Final = (1.0, 0.5, 0.25, 0.0)
"""Of each image that is made: size of its grains as a share of its sides; 0 is a grain for each pixel."""


def record_golden(model: FrozenModel, spec: InputSpec) -> bytes:
    """The file of a golden batch: noise of several grains, and what a model makes of it where it is called."""
    generator = torch.Generator().manual_seed(0)
    images = torch.stack([_noise(spec, grain, generator) for grain in _GRAINS])
    logits = model.frozen(spec.normalise(images, model.device)).logits
    return encode_tensors({"images": images, "logits": logits.float()})


def check_golden(directory: Path, manifest: Manifest, model: FrozenModel) -> None:
    """Refuse a model that answers the golden batch otherwise than was recorded; one without such a batch passes.

    Args:
        directory: of the bundle.
        manifest: of the bundle.
        model: as it is to serve, with its runtime and on its device.

    Raises:
        GoldenError: it answers otherwise; the message says by how much at most, and where.
        TensorError: the file of the batch is not as `record_golden` writes it.
    """
    if manifest.golden is None:
        return
    tensors = read_tensors(directory, GOLDEN_FILE)
    images, expected = _checked(tensors, manifest)
    answers = model.frozen(manifest.input.normalise(images, model.device)).logits.float().cpu()
    differences = (answers - expected).abs().nan_to_num(torch.inf)
    greatest, scale = float(differences.max()), float(expected.abs().max().clamp_min(1e-12))
    kind = str(model.dtype).removeprefix("torch.")
    tolerance = manifest.golden.tolerance.get(kind, 0.0)
    if greatest <= tolerance * scale:
        return
    row, index = divmod(int(differences.argmax()), len(manifest.classes))
    raise GoldenError(
        f"{manifest.key} must not serve here: it answers its golden batch otherwise than where it was published; the "
        f"greatest difference is {greatest:.3g}, of the logit of {manifest.classes[index]!r} for image {row} "
        f"({float(answers[row, index]):.4g}, not {float(expected[row, index]):.4g}); {tolerance:g} of the largest "
        f"logit, {tolerance * scale:.3g}, is accepted in {kind}; look for another version of a library, a device or a "
        "layer that computes otherwise"
    )


def _noise(spec: InputSpec, grain: float, generator: torch.Generator) -> Tensor:
    """uint8 [C, H, W]; smooth where the grains are large, as photographs are."""
    sides = [max(2, round(1 / grain)) + 1 if grain else side for side in (spec.height, spec.width)]
    coarse = torch.rand(1, spec.channels, *sides, generator=generator)
    fine = F.interpolate(coarse, (spec.height, spec.width), mode="bilinear", align_corners=True)
    return (255 * fine[0]).round().to(torch.uint8)


def _checked(tensors: Mapping[str, Tensor], manifest: Manifest) -> tuple[Tensor, Tensor]:
    """Images and logits of the file; raises TensorError."""
    images, logits = (tensors.get(name, torch.empty(0)) for name in ("images", "logits"))
    wanted = torch.uint8, [len(images), *manifest.input.shape], torch.float32, [len(images), len(manifest.classes)]
    if len(images) < 1 or (images.dtype, [*images.shape], logits.dtype, [*logits.shape]) != wanted:
        raise TensorError(
            f"{GOLDEN_FILE} of {manifest.key} holds no images uint8 [B, {manifest.input.extent}] with logits float32 "
            f"[B, {len(manifest.classes)}]; publish the version again"
        )
    return images, logits
