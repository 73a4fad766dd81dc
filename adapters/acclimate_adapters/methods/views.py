"""Random views of one image, for methods that adapt to a single sample (MEMO, FedTHE+)."""

import torch
from torch import Tensor

from acclimate_adapters.errors import InputError

PADDING = 4  # pixels on each side that a crop may be shifted by


def views(x: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Random crops of the padded image, each mirrored left to right with probability 1/2.

    The usual augmentation of small images (crop with padding 4, horizontal flip). It works on normalised images, whose
    black is unknown here, so the padding repeats the edge pixels: no value comes up that the image does not hold.

    Args:
        x: [C, H, W], one image, on any device.
        count: number of views, at least 1.
        generator: a CPU generator, so that a device does not change the draws; `keyed_generator` makes one.

    Returns:
        [count, C, H, W], on the device and in the precision of x; the original is not among them.

    Raises:
        InputError: x is not an image [C, H, W].
    """
    if x.dim() != 3:
        raise InputError(f"views are made of one image [C, H, W]; this has shape {[*x.shape]}")
    shift = torch.randint(-PADDING, PADDING + 1, (2, count, 1), generator=generator)
    mirrored = torch.rand(count, 1, generator=generator) < 0.5
    height, width = x.shape[1:]
    rows = (torch.arange(height) + shift[0]).clamp(0, height - 1)  # [count, H]; clamping repeats the edge
    columns = (torch.arange(width) + shift[1]).clamp(0, width - 1)  # [count, W]
    columns = torch.where(mirrored, columns.flip(1), columns)
    return x[:, rows[:, :, None].to(x.device), columns[:, None, :].to(x.device)].movedim(1, 0)
