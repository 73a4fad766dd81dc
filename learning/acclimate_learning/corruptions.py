"""Corruptions of images, at severities 1 to 5, for grey and colour images of any size.

Families and severities follow Hendrycks and Dietterich, "Benchmarking neural network robustness to common corruptions
and perturbations", ICLR 2019. Lengths are given for images whose shorter side has 32 pixels and grow with the image.
Every function takes pixels [N, C, H, W] in 0..1, a severity and a generator of its own, and gives new pixels in 0..1.
"""

import io
import math
from collections.abc import Callable, Mapping
from typing import Final

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from PIL import Image
from torch import Tensor

from acclimate_learning.errors import LearningError

SEVERITIES: Final = (1, 2, 3, 4, 5)
Corruption = Callable[[Tensor, int, torch.Generator], Tensor]


def corrupt(images: Tensor, family: str, severity: int, draw: torch.Generator) -> Tensor:
    """Corrupted copies of images.

    Args:
        images: uint8 [N, C, H, W].
        family: a name in `FAMILIES`, or "none".
        severity: 1 (weak) to 5 (strong).
        draw: of what is random.

    Returns:
        uint8 [N, C, H, W].

    Raises:
        LearningError: there is no such family or severity.
    """
    if family == "none":
        return images
    if family not in FAMILIES:
        raise LearningError(f"there is no corruption {family!r}; there are {', '.join(FAMILIES)}")
    if severity not in SEVERITIES:
        raise LearningError(f"severities are 1 to 5, not {severity}")
    changed = FAMILIES[family](images.float() / 255, severity, draw)
    return (changed.clamp(0, 1) * 255).round().to(torch.uint8)


def gaussian_noise(x: Tensor, severity: int, draw: torch.Generator) -> Tensor:
    """Noise of a dark sensor."""
    return x + (0.04, 0.08, 0.12, 0.18, 0.26)[severity - 1] * _normal(x.shape, draw)


def shot_noise(x: Tensor, severity: int, draw: torch.Generator) -> Tensor:
    """Noise of few photons (Poisson)."""
    photons = (60, 25, 12, 7, 4)[severity - 1]
    return torch.poisson(x.clamp(0, 1) * photons, generator=draw) / photons


def impulse_noise(x: Tensor, severity: int, draw: torch.Generator) -> Tensor:
    """Pixels that are black or white."""
    share = (0.03, 0.06, 0.1, 0.17, 0.27)[severity - 1]
    chance = torch.rand(len(x), 1, *x.shape[2:], generator=draw)
    return torch.where(chance < share / 2, 0.0, torch.where(chance > 1 - share / 2, 1.0, x))


def speckle_noise(x: Tensor, severity: int, draw: torch.Generator) -> Tensor:
    """Noise that is larger where the image is brighter."""
    return x + x * (0.15, 0.2, 0.35, 0.45, 0.6)[severity - 1] * _normal(x.shape, draw)


def gaussian_blur(x: Tensor, severity: int, draw: torch.Generator) -> Tensor:
    """Blur."""
    sigma = (0.5, 0.8, 1.1, 1.5, 2.0)[severity - 1] * _scale(x)
    radius = max(1, round(3 * sigma))
    along = torch.arange(-radius, radius + 1.0)
    line = torch.exp(-along.square() / (2 * sigma * sigma))
    return _filtered(x, torch.outer(line, line))


def defocus_blur(x: Tensor, severity: int, draw: torch.Generator) -> Tensor:
    """A lens out of focus: the mean over a disk."""
    radius = (0.8, 1.1, 1.5, 2.0, 2.6)[severity - 1] * _scale(x)
    reach = max(1, math.ceil(radius))
    along = torch.arange(-reach, reach + 1.0)
    distance = (along.square().view(-1, 1) + along.square()).sqrt()
    return _filtered(x, (radius + 0.5 - distance).clamp(0, 1))


def motion_blur(x: Tensor, severity: int, draw: torch.Generator) -> Tensor:
    """A moving camera: the mean along a line."""
    length = (3, 4, 6, 8, 10)[severity - 1] * _scale(x)
    reach = max(1, math.ceil(length / 2))
    angle = math.pi * float(torch.rand((), generator=draw))
    along = torch.arange(-reach, reach + 1.0)
    rows, columns = along.view(-1, 1), along.view(1, -1)
    across = (rows * math.cos(angle) - columns * math.sin(angle)).abs()
    within = (rows * math.sin(angle) + columns * math.cos(angle)).abs() <= length / 2
    return _filtered(x, (1 - across).clamp_min(0) * within)


def zoom_blur(x: Tensor, severity: int, draw: torch.Generator) -> Tensor:
    """A camera that moves towards the scene: the mean of enlarged images."""
    most = (1.06, 1.11, 1.16, 1.21, 1.31)[severity - 1]
    zooms = torch.linspace(1, most, 6)
    return torch.stack([_sampled(x, _grid(x) / zoom) for zoom in zooms]).mean(0)


def fog(x: Tensor, severity: int, draw: torch.Generator) -> Tensor:
    """Bright clouds before the scene."""
    share = (0.2, 0.3, 0.4, 0.5, 0.6)[severity - 1]
    return x * (1 - share) + share * (0.5 + 0.5 * _clouds(x, draw))


def spatter(x: Tensor, severity: int, draw: torch.Generator) -> Tensor:
    """Grey drops on the lens."""
    threshold = (0.82, 0.76, 0.7, 0.65, 0.6)[severity - 1]
    drops = ((_clouds(x, draw, finest=4) - threshold) / 0.05).clamp(0, 1)
    return x * (1 - drops) + 0.5 * drops


def brightness(x: Tensor, severity: int, draw: torch.Generator) -> Tensor:
    """Too much light."""
    return x + (0.1, 0.2, 0.3, 0.4, 0.5)[severity - 1]


def contrast(x: Tensor, severity: int, draw: torch.Generator) -> Tensor:
    """Little contrast."""
    mean = x.mean((1, 2, 3), keepdim=True)
    return mean + (x - mean) * (0.75, 0.55, 0.4, 0.3, 0.2)[severity - 1]


def gamma(x: Tensor, severity: int, draw: torch.Generator) -> Tensor:
    """Dark middle tones."""
    return x.clamp(0, 1) ** (1.4, 1.8, 2.3, 3.0, 4.0)[severity - 1]


def vignette(x: Tensor, severity: int, draw: torch.Generator) -> Tensor:
    """Dark corners."""
    distance = _grid(x).square().sum(-1).unsqueeze(1)  # 0 in the middle, 2 in the corners
    return x * (1 - (0.15, 0.25, 0.35, 0.45, 0.5)[severity - 1] * distance)


def elastic(x: Tensor, severity: int, draw: torch.Generator) -> Tensor:
    """Local stretching."""
    reach = (0.06, 0.09, 0.12, 0.16, 0.2)[severity - 1]
    coarse = torch.rand(len(x), 2, 4, 4, generator=draw) * 2 - 1
    moved = F.interpolate(coarse, size=x.shape[2:], mode="bicubic", align_corners=False).permute(0, 2, 3, 1)
    return _sampled(x, _grid(x) + reach * moved)


def pixelate(x: Tensor, severity: int, draw: torch.Generator) -> Tensor:
    """Fewer pixels."""
    share = (0.8, 0.65, 0.5, 0.4, 0.3)[severity - 1]
    small = [max(1, round(side * share / _scale(x))) for side in x.shape[2:]]
    return F.interpolate(F.interpolate(x, size=small, mode="area"), size=x.shape[2:], mode="nearest")


def jpeg(x: Tensor, severity: int, draw: torch.Generator) -> Tensor:
    """A JPEG file of low quality."""
    quality = (40, 25, 16, 10, 6)[severity - 1]
    pixels = (x.clamp(0, 1) * 255).round().to(torch.uint8)
    if x.shape[1] == 3:
        return torch.stack([_encoded(each.permute(1, 2, 0).numpy(), quality).permute(2, 0, 1) for each in pixels])
    planes = pixels.flatten(0, 1)
    return torch.stack([_encoded(each.numpy(), quality) for each in planes]).view(x.shape)


def posterize(x: Tensor, severity: int, draw: torch.Generator) -> Tensor:
    """Few levels of grey or colour."""
    levels = (15, 7, 5, 3, 2)[severity - 1]
    return (x * levels).round() / levels


def dead_rows(x: Tensor, severity: int, draw: torch.Generator) -> Tensor:
    """Rows of a sensor that give nothing."""
    share = (0.05, 0.1, 0.15, 0.22, 0.3)[severity - 1]
    return x * (torch.rand(len(x), 1, x.shape[2], 1, generator=draw) >= share)


FAMILIES: Final[Mapping[str, Corruption]] = {
    function.__name__: function
    for function in (
        gaussian_noise, shot_noise, impulse_noise, speckle_noise,
        gaussian_blur, defocus_blur, motion_blur, zoom_blur,
        fog, spatter, brightness, contrast, gamma, vignette,
        elastic, pixelate, jpeg, posterize, dead_rows,
    )
}  # fmt: skip


def _normal(shape: torch.Size, draw: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=draw)


def _scale(x: Tensor) -> float:
    """How much larger than 32 pixels the shorter side is."""
    return min(x.shape[2:]) / 32


def _filtered(x: Tensor, kernel: Tensor) -> Tensor:
    """Each channel filtered by a kernel [k, k] of odd size, whose sum becomes 1."""
    size, channels = len(kernel), x.shape[1]
    weight = (kernel / kernel.sum()).expand(channels, 1, size, size)
    padded = F.pad(x, [size // 2] * 4, mode="replicate")
    return F.conv2d(padded, weight, groups=channels)


def _grid(x: Tensor) -> Tensor:
    """Places of all pixels, [N, H, W, 2], -1 to 1."""
    height, width = x.shape[2:]
    rows, columns = ((torch.arange(side) + 0.5) * 2 / side - 1 for side in (height, width))
    grid = torch.stack(torch.meshgrid(rows, columns, indexing="ij")[::-1], -1)
    return grid.expand(len(x), height, width, 2)


def _sampled(x: Tensor, grid: Tensor) -> Tensor:
    return F.grid_sample(x, grid, mode="bilinear", padding_mode="border", align_corners=False)


def _clouds(x: Tensor, draw: torch.Generator, finest: int = 16) -> Tensor:
    """Clouds [N, 1, H, W] in 0..1: noise at several sizes, the coarser the stronger."""
    total = torch.zeros(len(x), 1, *x.shape[2:])
    for cells in (size for size in (2, 4, 8, 16) if size <= finest or finest < 2):
        noise = torch.rand(len(x), 1, cells, cells, generator=draw)
        total += F.interpolate(noise, size=x.shape[2:], mode="bicubic", align_corners=False) / cells
    low, high = total.amin((2, 3), keepdim=True), total.amax((2, 3), keepdim=True)
    return (total - low) / (high - low).clamp_min(1e-6)


def _encoded(pixels: np.ndarray, quality: int) -> Tensor:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "JPEG", quality=quality)
    return torch.from_numpy(np.asarray(Image.open(buffer)).copy()).float() / 255
