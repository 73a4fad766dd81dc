"""The two places of a network that the methods look into: BatchNorm layers and the classifier.

A network is instrumented once, when it is frozen: its BatchNorm layers and its classifier are replaced by `Norm` and
`Head` (`MapHead` where it is a convolution), which hold the same tensors under the same names and compute the same
numbers, and report to the probe of the running pass. The probe lives in a context variable, so passes on different
threads never meet and nothing is ever written to a module.
"""

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TypeGuard

import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from acclimate_adapters.errors import ConfigurationError

STATISTICS = ("running_mean", "running_var")


class Norm(nn.Module):
    """A BatchNorm layer in evaluation mode whose normalisation the running pass may replace."""

    weight: nn.Parameter | None
    bias: nn.Parameter | None
    running_mean: Tensor
    running_var: Tensor

    def __init__(self, name: str, origin: _BatchNorm) -> None:
        super().__init__()
        self.name = name
        self.eps = origin.eps
        adopt(self, origin)
        self.register_buffer("running_mean", origin.running_mean)
        self.register_buffer("running_var", origin.running_var)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x [B, C, ...] by the rule of the running pass, by the running statistics without one."""
        probe = _running.get()
        if probe is None or probe.normalise is None:
            return self.by_statistics(x, self.running_mean, self.running_var)
        return probe.normalise(self, x)

    def by_statistics(self, x: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
        """Normalise by given statistics [C], which carry no gradient."""
        return F.batch_norm(x, mean, variance, self.weight, self.bias, False, 0.0, self.eps)

    def by_batch(self, x: Tensor) -> Tensor:
        """Normalise by the batch's own mean and biased variance, through which the gradient flows."""
        return F.batch_norm(x, None, None, self.weight, self.bias, True, 0.0, self.eps)


class Head(nn.Module):
    """The linear classifier, which shows the running pass its input: the features."""

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(self, origin: nn.Linear) -> None:
        super().__init__()
        adopt(self, origin)

    def forward(self, features: Tensor) -> Tensor:
        """Logits [B, K] of features [B, d]."""
        probe = _running.get()
        if probe is not None:
            probe.features = features
        return F.linear(features, self.weight, self.bias)


class MapHead(nn.Module):
    """A classifier that gives a map of logits, whose mean over all places is the answer, as in SqueezeNet.

    Features are the means of its input over all places. A function between this layer and the mean, as SqueezeNet's
    ReLU, makes the answer something else than a linear function of them.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(self, origin: nn.Conv2d) -> None:
        super().__init__()
        adopt(self, origin)

    def forward(self, maps: Tensor) -> Tensor:
        """Maps of logits [B, K, H, W] of maps [B, d, H, W]."""
        probe = _running.get()
        if probe is not None:
            probe.features = maps.mean((2, 3))
        return F.conv2d(maps, self.weight, self.bias)


Normalise = Callable[[Norm, Tensor], Tensor]


@dataclass(slots=True)
class Probe:
    """What one pass wants of the instrumented layers, and the features it met."""

    normalise: Normalise | None = None
    features: Tensor | None = None

    def run(self, forward: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """Call `forward` with this probe in place."""
        token = _running.set(self)
        try:
            return forward(x)
        finally:
            _running.reset(token)


_running: ContextVar[Probe | None] = ContextVar("acclimate_probe", default=None)


def instrument(net: nn.Module, classifier: str | None) -> tuple[str, ...]:
    """Replace the BatchNorm layers and the classifier, if there is one, of a network that nobody else holds.

    Returns:
        Names of the BatchNorm layers that keep no running statistics and therefore cannot be adapted; they stay.

    Raises:
        ConfigurationError: there is no layer of that name which may be a classifier.
    """
    if classifier is not None:
        _replace(net, classifier, _head(net, classifier))
    skipped = []
    for name, module in list(net.named_modules()):
        if isinstance(module, _BatchNorm):
            if module.running_mean is None or module.running_var is None:
                skipped.append(name)
            else:
                _replace(net, name, Norm(name, module))
    return tuple(skipped)


def _head(net: nn.Module, classifier: str) -> Head | MapHead:
    """What takes the place of the classifier; raises ConfigurationError if it is no layer that may be one."""
    layer = dict(net.named_modules()).get(classifier)
    if isinstance(layer, nn.Linear):
        return Head(layer)
    if is_pointwise(layer):
        return MapHead(layer)
    linear = [name for name, module in net.named_modules() if isinstance(module, nn.Linear)]
    raise ConfigurationError(
        f"the classifier {classifier!r} is neither a linear layer of the network nor a 1x1 convolution; its linear "
        f"layers are {linear}"
    )


def is_pointwise(module: nn.Module | None) -> TypeGuard[nn.Conv2d]:
    """Whether a layer is a convolution that looks at each place by itself."""
    return (
        isinstance(module, nn.Conv2d)
        and module.kernel_size == module.stride == (1, 1)
        and module.padding == (0, 0)
        and module.groups == 1
    )


def adopt(module: nn.Module, origin: nn.Module) -> None:
    """Give a module the weight and the bias of another, under the same names."""
    parameters = dict(origin.named_parameters(recurse=False))
    for name in ("weight", "bias"):
        module.register_parameter(name, parameters.get(name))


def _replace(net: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, child = name.rpartition(".")
    setattr(net.get_submodule(parent), child, module)
