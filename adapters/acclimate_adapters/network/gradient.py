"""The gradient of an objective of one pass, and the BatchNorm rule of the methods that train on batch statistics."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from acclimate_adapters.network.model import FrozenModel, Pass
from acclimate_adapters.network.probes import Norm, Normalise


class BatchStatistics:
    """Normalises by the batch's own statistics; where they are undefined, by the running statistics.

    They are undefined in a layer that sees a single value per channel: a batch of one into BatchNorm1d, or into
    BatchNorm2d on a 1x1 map.

    Attributes:
        undefined: layers of the pass that fell back to their running statistics.
    """

    def __init__(self) -> None:
        self.undefined = 0

    def __call__(self, norm: Norm, x: Tensor) -> Tensor:
        """Normalise x [B, C, ...]."""
        if x.numel() > x.shape[1]:
            return norm.by_batch(x)
        self.undefined += 1
        return norm.by_statistics(x, norm.running_mean, norm.running_var)


def gradient(
    model: FrozenModel,
    x: Tensor,
    at: Mapping[str, Tensor],
    objective: Callable[[Pass], Tensor],
    normalise: Normalise | None = None,
) -> tuple[dict[str, Tensor], Pass]:
    """Gradient of an objective of one pass with respect to the parameters that replace those of the model.

    It works whether or not the caller turned gradients off, also in inference mode.

    Args:
        x: [B, C, H, W], a batch that `FrozenModel.batch` has checked.
        at: parameter name -> value at which the gradient is taken; not written to.
        objective: maps the features and logits of the pass to a scalar.
        normalise: rule for the BatchNorm layers; the running statistics when None.

    Returns:
        The gradient by parameter name, and the pass, detached.
    """
    with torch.inference_mode(False), torch.set_grad_enabled(bool(at)):
        leaves = {name: _own(tensor).requires_grad_() for name, tensor in at.items()}
        answer = model.run(_own(x), leaves, normalise)
        parts = torch.autograd.grad(objective(answer), list(leaves.values()), materialize_grads=True) if leaves else ()
    return dict(zip(leaves, parts, strict=True)), Pass(answer.features.detach(), answer.logits.detach())


def _own(tensor: Tensor) -> Tensor:
    return tensor.clone() if tensor.is_inference() else tensor.detach()  # autograd refuses inference tensors
