"""What a pass through a network shows of it: size of the input, classifier, features, BatchNorm layers."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from acclimate_adapters.network.probes import is_pointwise
from acclimate_store.errors import ArchitectureError

SIZES: Final = (8, 16, 24, 28, 32, 48, 64, 96, 112, 128, 160, 192, 224, 240, 256, 288, 299, 320, 336, 384, 448, 512)
"""Heights and widths that are tried where the size of the input is not said."""

Shape = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Anatomy:
    """What adapters need to know of a network.

    Args:
        shape: channels, height and width of an input.
        classifier: name of the layer that gives the logits: linear, or a 1x1 convolution whose map of them is averaged;
            None if no such layer does.
        features: width of its input; 0 without one.
        classes: of the answer.
        norms: BatchNorm layers that keep running statistics.
        without_statistics: BatchNorm layers that keep none, and cannot be adapted.
    """

    shape: Shape
    classifier: str | None
    features: int
    classes: int
    norms: tuple[str, ...]
    without_statistics: tuple[str, ...]


def inspect_network(net: nn.Module, shape: Shape, classifier: str | None = None) -> Anatomy:
    """Look at a network during one pass over noise.

    Args:
        net: in evaluation mode.
        shape: of an input.
        classifier: where it is said and not to be found.

    Raises:
        ArchitectureError: the pass fails, the answer is not logits [B, K], or the classifier that was said does not
            give them.
    """
    x = torch.rand(2, *shape, generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), _noting_outputs(net) as outputs:
        try:
            logits = net(x)
        except Exception as error:  # foreign layers may raise anything
            raise ArchitectureError(f"the network fails on a batch of shape {[*x.shape]}: {error}") from error
    _require_logits(logits)
    name = classifier or _classifier(net, outputs, logits)
    head = _head(net, name, outputs, logits) if name else None
    norms = [(n, m) for n, m in net.named_modules() if isinstance(m, _BatchNorm)]
    return Anatomy(
        shape=shape,
        classifier=name or None,
        features=head.weight.shape[1] if head else 0,
        classes=logits.shape[1],
        norms=tuple(n for n, m in norms if m.running_mean is not None),
        without_statistics=tuple(n for n, m in norms if m.running_mean is None),
    )


def possible_shapes(net: nn.Module) -> tuple[Shape, ...]:
    """Shapes of square inputs that a network takes, of those that are tried; none if it has no convolution.

    Nothing is computed: the passes are over tensors without content.
    """
    first = next((m for m in net.modules() if isinstance(m, nn.Conv2d)), None)
    if first is None:
        return ()
    empty = copy.deepcopy(net).to("meta").eval()
    shapes = [(first.in_channels, size, size) for size in SIZES]
    return tuple(shape for shape in shapes if _takes(empty, shape))


def _takes(empty: nn.Module, shape: Shape) -> bool:
    try:
        with torch.no_grad():
            answer = empty(torch.empty(2, *shape, device="meta"))
    except Exception:  # foreign layers may raise anything
        return False
    return isinstance(answer, Tensor) and answer.dim() == 2 and len(answer) == 2


def _require_logits(logits: Any) -> None:
    if not isinstance(logits, Tensor):
        raise ArchitectureError(
            f"the network answers with a {type(logits).__name__}; wrap it in a module whose forward gives logits [B, K]"
        )
    if logits.dim() != 2 or len(logits) != 2 or logits.shape[1] < 2:
        raise ArchitectureError(f"the network answers 2 images with {[*logits.shape]}; logits are [2, K], K at least 2")
    if not bool(torch.isfinite(logits).all()):
        raise ArchitectureError("the network answers noise with non-finite logits; check its weights")


def _classifier(net: nn.Module, outputs: dict[str, Tensor], logits: Tensor) -> str | None:
    """Name of the layer that gives the logits, the last one if several do; None if none does."""
    found = [name for name, output in outputs.items() if _gives(output, logits)]
    if found:
        return found[-1]
    fitting = {name: output for name, output in outputs.items() if output.shape == logits.shape}
    for name, output in fitting.items():
        for function, turned in (("softmax", output.softmax(-1)), ("log_softmax", output.log_softmax(-1))):
            if torch.allclose(turned, logits, atol=1e-6):
                raise ArchitectureError(
                    f"the network answers with the {function} of its layer {name}; leave that function out, adapters "
                    "need the logits themselves"
                )
    if bool((logits >= 0).all()) and torch.allclose(logits.sum(1), torch.ones(len(logits)), atol=1e-4):
        raise ArchitectureError(
            "the network answers with probabilities; leave the last softmax out, adapters need the logits themselves"
        )
    return None


def _head(net: nn.Module, name: str, outputs: dict[str, Tensor], logits: Tensor) -> nn.Linear | nn.Conv2d:
    """The layer of that name, which gives the logits; raises ArchitectureError if it does not."""
    head = dict(net.named_modules()).get(name)
    if not _may_classify(head):
        raise ArchitectureError(
            f"{name} is no linear layer of the network and no 1x1 convolution; {_linear_layers(net)}"
        )
    if name not in outputs or not _gives(outputs[name], logits):
        raise ArchitectureError(f"the answer of the network is not what its layer {name} gives; {_linear_layers(net)}")
    return head


def _may_classify(module: nn.Module | None) -> TypeGuard[nn.Linear | nn.Conv2d]:
    return isinstance(module, nn.Linear) or is_pointwise(module)


def _gives(output: Tensor, logits: Tensor) -> bool:
    """Whether the output of a layer is the answer or a map [B, K, H, W] whose mean it is, perhaps after a ReLU."""
    if output.dim() != 4:
        return output.shape == logits.shape and torch.equal(output, logits)
    if output.shape[:2] != logits.shape:
        return False
    return any(torch.allclose(each.mean((2, 3)), logits, atol=1e-5) for each in (output, output.relu()))


def _linear_layers(net: nn.Module) -> str:
    linear = [name for name, module in net.named_modules() if isinstance(module, nn.Linear)]
    return f"its linear layers are {', '.join(linear[-5:]) or 'none'}"


@contextmanager
def _noting_outputs(net: nn.Module) -> Iterator[dict[str, Tensor]]:
    """The outputs of all layers that may be the classifier by name, in the order in which they are given."""
    outputs: dict[str, Tensor] = {}

    def note(name: str) -> Any:
        def hook(module: nn.Module, arguments: Any, output: Tensor) -> None:
            outputs.pop(name, None)
            outputs[name] = output.clone()  # a ReLU may follow that works in place

        return hook

    hooks = [m.register_forward_hook(note(n)) for n, m in net.named_modules() if _may_classify(m)]
    try:
        yield outputs
    finally:
        for hook in hooks:
            hook.remove()
