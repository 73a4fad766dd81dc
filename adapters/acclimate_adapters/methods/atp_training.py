"""Learning ATP's adaptation rates from labelled source batches (Algorithm 1)."""

from collections.abc import Mapping, Sequence

import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from acclimate_adapters.functional import class_labels
from acclimate_adapters.methods.atp import adapt
from acclimate_adapters.network.direction import direction
from acclimate_adapters.network.gradient import gradient
from acclimate_adapters.network.model import FrozenModel
from acclimate_adapters.network.probes import Norm


def refine(model: FrozenModel, rates: Mapping[str, float], x: Tensor, labels: Tensor, lr: float) -> dict[str, float]:
    """Rates after one labelled batch (ClientTrain, lines 11 to 14).

    Method:
        h     = direction of the batch at the global weights                         (Eq. 4, 5)
        w     = w_G + alpha * h, running variances clamped at 0                      (Eq. 6)
        g     = gradient of the cross-entropy at w, running statistics included
        alpha = alpha - lr * <g, h> / sqrt(number of elements), module by module     (Eq. 7)

    h counts as constant in alpha, so no second derivative is needed. The square root stands in the text below Eq. 7.

    Args:
        model: the frozen model; its own rates are not used.
        rates: alpha of every module of `model.modules`.
        x: [B, C, H, W], normalised.
        labels: [B], int64 in 0..K-1.
        lr: eta, the learning rate of the rates.

    Raises:
        InputError: the batch cannot be used, or its labels do not fit it.
    """
    x = model.batch(x)
    labels = class_labels(labels, len(x), model.classes).to(model.device)
    h = direction(model, x).tensors
    adapted, _ = adapt(model, h, rates)
    g, _ = gradient(
        model, x, adapted, lambda answer: F.cross_entropy(answer.logits, labels), _by_differentiable_statistics
    )
    slopes = {name: float((g[name] * h[name]).sum()) / h[name].numel() ** 0.5 for name in h}
    return {name: rates[name] - lr * slopes[name] for name in rates}


def average(rates: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Rates of the next round: the unweighted mean over the clients (ServerTrain, line 6)."""
    return {name: sum(client[name] for client in rates) / len(rates) for name in rates[0]}


def _by_differentiable_statistics(norm: Norm, x: Tensor) -> Tensor:
    """Normalise by the running statistics such that gradients reach them, which torch's own kernel does not offer."""
    shape = (1, -1, *(1,) * (x.dim() - 2))
    mean, variance = norm.running_mean.view(shape), norm.running_var.view(shape)
    normalised = (x - mean) / (variance + norm.eps).sqrt()
    if norm.weight is not None:
        normalised = normalised * norm.weight.view(shape)
    return normalised if norm.bias is None else normalised + norm.bias.view(shape)
