"""The mathematics shared by the methods: pure functions of tensors."""

import hashlib
import math
from collections.abc import Iterable
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from acclimate_adapters.errors import InputError

Numbers: TypeAlias = NDArray[np.float64]
"""A few numbers on the host: NumPy takes a tenth of the time that torch needs for each operation on them."""


def numbers(tensor: Tensor) -> Numbers:
    """The numbers of a tensor, in its shape; they may be its own memory, and are not to be written to."""
    if tensor.dtype == torch.bfloat16:  # which NumPy does not know
        tensor = tensor.float()
    found: Numbers = tensor.numpy(force=True).astype(np.float64, copy=False)
    return found


def log_softmax(x: Numbers) -> Numbers:
    """Log-probabilities of each row of finite logits [..., K]."""
    shifted = x - x.max(axis=-1, keepdims=True)
    log_p: Numbers = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return log_p


def at_least_float32(x: Tensor) -> Tensor:
    """The tensor in single precision at least: half precision overflows at 65504 and loses small probabilities."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def finite(x: Tensor) -> bool:
    """Whether all numbers are finite: their sum is only if they are, and seldom overflows otherwise."""
    return math.isfinite(float(x.sum())) or bool(torch.isfinite(x).all())


def unshared(tensors: Iterable[Tensor]) -> list[Tensor]:
    """The same tensors, each in memory of its own, none repeating a number: a copy stands for those that are not so."""
    taken, found = set[int](), []
    for tensor in tensors:
        address = tensor.untyped_storage().data_ptr()
        found.append(tensor.clone() if address in taken or 0 in tensor.stride() else tensor)
        taken.add(address)
    return found


def entropy(logits: Tensor) -> Tensor:
    """Shannon entropy of each row's softmax, in nats.

    Args:
        logits: [..., K], any real numbers; log-probabilities up to a row constant.

    Returns:
        [...], in 0..ln K; in single precision at least.
    """
    log_p = torch.log_softmax(at_least_float32(logits), dim=-1)
    return -(log_p.exp() * log_p).sum(dim=-1)


def batch_statistics(x: Tensor) -> tuple[Tensor, Tensor | None]:
    """Mean and *unbiased* variance per channel, the convention of BatchNorm's running statistics.

    Args:
        x: [B, C, ...], the input of a BatchNorm layer.

    Returns:
        mean [C] and variance [C], in single precision at least; the variance is None when each channel holds a single
        value, where it is undefined.
    """
    x = at_least_float32(x)
    values = x.numel() // x.shape[1]
    if values == 1:
        return x.reshape(-1).clone(), None
    if x.device.type == "cpu":
        return _cpu_statistics(x, values)
    variance, mean = torch.var_mean(x, [d for d in range(x.dim()) if d != 1], correction=1)
    return mean, variance


def _cpu_statistics(x: Tensor, values: int) -> tuple[Tensor, Tensor]:
    """Mean and unbiased variance in two passes, five times as fast as torch's single one, which does not vectorise.

    Everything is relative to one of the values, so that those of a constant channel differ by exactly 0.
    """
    channels = x.flatten(2) if x.dim() > 2 else x.unsqueeze(-1)  # [B, C, S]
    first = channels[0, :, :1]
    deviations = channels - first
    mean = deviations.mean((0, 2)).unsqueeze(-1)
    variance = deviations.sub_(mean).square_().sum((0, 2)) / (values - 1)
    return (first + mean).squeeze(-1), variance


def project_to_simplex(v: Tensor) -> Tensor:
    """Euclidean projection of each row onto the probability simplex.

    Sort-and-threshold algorithm of Duchi et al., "Efficient projections onto the l1-ball", ICML 2008.

    Args:
        v: [..., K], finite.

    Returns:
        [..., K], non-negative, rows sum to 1.
    """
    ordered = v.sort(dim=-1, descending=True).values
    ranks = torch.arange(1, v.shape[-1] + 1, dtype=v.dtype, device=v.device)
    excess = ordered.cumsum(dim=-1) - 1  # what the ranks largest entries sum to beyond 1
    support = (ordered - excess / ranks > 0).sum(dim=-1, keepdim=True)  # [..., 1], number of positive entries
    threshold = excess.gather(-1, support - 1) / support
    return (v - threshold).clamp_min(0)


def keyed_generator(*key: int) -> torch.Generator:
    """A CPU generator of its own for each key: equal keys give equal draws, in every process and on every device.

    Args:
        key: what the draws may depend on, such as a seed, `State.step` and the row of a sample.
    """
    digest = hashlib.blake2b("/".join(map(str, key)).encode(), digest_size=4).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little"))


def class_labels(labels: Tensor, rows: int, classes: int) -> Tensor:
    """Pass labels [rows] through, int64 in 0..classes-1.

    Raises:
        InputError: they are not.
    """
    wanted = f"{rows} labels are needed, int64, from 0 to {classes - 1}"
    if labels.dtype != torch.int64 or labels.shape != (rows,):
        raise InputError(f"{wanted}; these are {labels.dtype} of shape {[*labels.shape]}")
    if not bool(((labels >= 0) & (labels < classes)).all()):
        raise InputError(f"{wanted}; these run from {int(labels.min())} to {int(labels.max())}")
    return labels
