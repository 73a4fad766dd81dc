"""Which corruptions make images most like those of the target side, which need no labels for it.

Images are compared by what corruptions change and content hardly does: how bright and how contrasted they are, how
much they differ from pixel to pixel at several scales, whether along one axis more than along the other, and how rough
these differences are.
"""

from pathlib import Path
from typing import Final

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from acclimate_learning.clients import FAMILIES_OF, Families, Images, Pool, Role
from acclimate_learning.corruptions import SEVERITIES, corrupt
from acclimate_learning.errors import LearningError
from acclimate_store import InputSpec
from acclimate_store.datasets import SUFFIXES, decoded

MOST_IMAGES: Final = 128
"""Most images that are looked at, of the target side and of the source."""
FEWEST_IMAGES: Final = 20
"""Least images of the target side: fewer say more of their content than of how they were taken."""
SCALES: Final = 3
"""Differences are taken between neighbours, between means of 2 x 2 pixels, and between means of 4 x 4."""


def read_unlabelled(folder: Path, spec: InputSpec) -> Images:
    """Image files anywhere below a folder as the network gets them, uint8 [N, C, H, W]; of many, every second, ...

    Raises:
        LearningError: there are too few.
        SampleError: one of them cannot be read.
    """
    files = sorted(file for file in folder.rglob("*") if file.suffix.lower() in SUFFIXES)
    if len(files) < FEWEST_IMAGES:
        raise LearningError(f"--like {folder} holds {len(files)} image files; at least {FEWEST_IMAGES} are needed")
    chosen = files[:: -(-len(files) // MOST_IMAGES)]
    return np.stack([decoded(file.read_bytes(), str(file), spec) for file in chosen])


def families_like(target: Images, pool: Pool, seed: int) -> Families:
    """The half of each role's corruption families that makes images of the pool most like the target's.

    Roles keep apart: what teaches is chosen among the families that teach, what judges among those that judge.

    Args:
        target: unlabelled images of the target side, uint8 [N, C, H, W].
        pool: images of the source.
        seed: of the images that are corrupted, and of what is random in a corruption.
    """
    draw = np.random.default_rng([seed, 13])
    rows = draw.permutation(len(pool.images))[:MOST_IMAGES]
    source = torch.from_numpy(pool.images[np.sort(rows)])
    wanted = traits(torch.from_numpy(target)).mean(0)
    spread = traits(source).std(0).clamp_min(1e-3)
    found: dict[Role, tuple[str, ...]] = {}
    for role, families in FAMILIES_OF.items():
        distances = {family: _distance(source, family, wanted, spread, seed) for family in families}
        found[role] = tuple(sorted(families, key=lambda family: distances[family])[: (len(families) + 1) // 2])
    return found


def traits(images: Tensor) -> Tensor:
    """What is compared, of each image: [N, 3 + 3 * SCALES].

    Args:
        images: uint8 [N, C, H, W].
    """
    x = images.float().mean(1, keepdim=True) / 255
    flat = x.flatten(1)
    parts = [flat.mean(1), flat.std(1), flat.median(1).values]
    for scale in range(SCALES):
        small = F.avg_pool2d(x, 2**scale) if min(x.shape[2:]) >= 2 ** (scale + 1) else x
        down, across = small.diff(dim=2).flatten(1), small.diff(dim=3).flatten(1)
        size = torch.cat([down, across], 1).abs().mean(1).clamp_min(1e-4)
        parts.append(size.log())
        parts.append(((down.abs().mean(1) + 1e-4) / (across.abs().mean(1) + 1e-4)).log().abs())
        parts.append(torch.cat([down, across], 1).square().mean(1).sqrt().clamp_min(1e-4).log() - size.log())
    return torch.stack(parts, 1)


def _distance(source: Tensor, family: str, wanted: Tensor, spread: Tensor, seed: int) -> float:
    """How far the images of a family are from the wanted traits at the severity at which they are nearest."""
    found = []
    for severity in SEVERITIES:
        changed = corrupt(source, family, severity, torch.Generator().manual_seed(seed))
        found.append(float(((traits(changed).mean(0) - wanted) / spread).square().mean()))
    return min(found)
