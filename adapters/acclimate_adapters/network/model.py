"""The frozen global model: one network and its source quantities, shared by all clients and never written to."""

import copy
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self, TypeAlias, TypeVar

import torch
from torch import Tensor, nn

from acclimate_adapters.errors import AcclimateError, ConfigurationError, InputError, NumericalError
from acclimate_adapters.functional import class_labels, finite
from acclimate_adapters.network.freezing import check_source, content_hash, ordinary
from acclimate_adapters.network.graphs import Graphs, Outcome, filled, graphs_for
from acclimate_adapters.network.layouts import Layouts
from acclimate_adapters.network.probes import STATISTICS, Norm, Normalise, Probe, instrument
from acclimate_adapters.source import Source

T = TypeVar("T")

REFUSALS = RuntimeError, ValueError, TypeError, IndexError, AssertionError, ArithmeticError
"""What torch and networks raise at a batch of a shape that they cannot take: `torch._assert` in a vision transformer,
an index in a network that looks at the third axis, and so on."""

FEATURE_CHUNK = 128  # inputs per pass where any number may come at once


@dataclass(frozen=True, slots=True)
class Pass:
    """What one forward pass yields."""

    features: Tensor  # [B, d], the input of the classifier; without one the logits
    logits: Tensor  # [B, K]


Runtime: TypeAlias = Callable[[Tensor], Pass]


class AnchorFeatures(NamedTuple):
    """The labelled anchors of the source as the classifier sees them."""

    features: Tensor  # [N, d], of the frozen model
    labels: Tensor  # [N], int64 in 0..K-1


class FrozenModel:
    """A classifier in evaluation mode with its tensors keyed by name, and what was measured at the source.

    Build it with `from_module`. Every method is pure and may be called from several threads at once.

    Attributes:
        classes: K, the number of classes.
        classifier: name of the layer that gives the logits; None if no layer does that may be one.
        feature_size: d, the width of the classifier's input; K without one, as the logits stand for features then.
        linear: whether the classifier is a linear layer; else it is a 1x1 convolution, whose map of logits is averaged.
        modules: names of all tensors that can be adapted: `parameters`, then `statistics`.
        parameters: names of weights and biases, in the order of the network.
        statistics: names of BatchNorm running statistics.
        skipped: BatchNorm layers that keep no running statistics and therefore cannot be adapted.
        row_norms: names of the LayerNorm and GroupNorm layers, which normalise each row by itself.
        anchor_features: features and labels of the source's anchors, taken once, here; None without anchors.
        graphs: through which the passes on a CUDA device are replayed.
        runtime: what computes the frozen passes; None for torch.
        gains: least share of right answers, -1..1, that adapters are proven to gain over this model, by adapter.
        content_hash: 16 hex digits over weights, running statistics, classifier name and source; a state made for one
            hash is refused by a model with another.
    """

    def __init__(self, net: nn.Module, classifier: str | None, source: Source, graphs: Graphs | None) -> None:
        """Take over a network that nobody else holds; callers use `from_module`."""
        self.content_hash = content_hash(net.state_dict(), classifier, source)
        self.classifier = classifier
        self.skipped = instrument(net, classifier)
        self._net, self._layouts = net, Layouts.of(net)
        self._derived: dict[Hashable, Any] = {}
        self._parameters = {name: p.detach() for name, p in net.named_parameters()}
        self._half = {name: p.dtype for name, p in self._parameters.items() if p.itemsize < torch.float32.itemsize}
        self.row_norms = tuple(
            n for n, module in net.named_modules() if isinstance(module, nn.LayerNorm | nn.GroupNorm)
        )
        self._norms = tuple(module for module in net.modules() if isinstance(module, Norm))
        self._buffers = {f"{norm.name}.{kind}": getattr(norm, kind) for norm in self._norms for kind in STATISTICS}
        self.parameters, self.statistics = tuple(self._parameters), tuple(self._buffers)
        self.modules = (*self.parameters, *self.statistics)
        if not self.parameters:
            raise ConfigurationError("the network has no parameters")
        self._last = self._parameters[self.parameters[-1] if classifier is None else f"{classifier}.weight"]
        self.classes, self.feature_size = self._last.shape[:2] if classifier else [len(source.prior)] * 2
        self.linear = classifier is not None and self._last.dim() == 2
        self.source = source
        self.graphs = graphs or graphs_for(self.device)
        self.runtime: Runtime | None = None
        self.gains: Mapping[Any, float] = {}
        check_source(self._parameters | self._buffers, source, classes=self.classes, feature_size=self.feature_size)
        self.anchor_features = self._anchor_features()

    @classmethod
    def from_module(
        cls, net: nn.Module, *, classifier: str | None, source: Source, graphs: Graphs | None = None
    ) -> Self:
        """Freeze a copy of a network.

        Args:
            net: maps x [B, C, H, W] to logits [B, K]; copied, so later changes to it have no effect.
            classifier: name of its last layer, linear or a 1x1 convolution, whose input are the features; None if it
                ends in something else.
            source: quantities of the training side.
            graphs: of this model alone; by default those of its device.

        Raises:
            ConfigurationError: the classifier is no such layer, there are no parameters, a weight is not finite, or the
                source speaks of other classes, features or modules than the network has.
        """
        with torch.inference_mode(False):
            return cls(ordinary(copy.deepcopy(net)).eval().requires_grad_(False), classifier, source, graphs)

    def with_runtime(self, runtime: Runtime) -> Self:
        """The same model, whose frozen passes are computed by something else than torch, up to rounding.

        Args:
            runtime: from x [B, C, H, W], a batch that `batch` has checked, to features and logits on its device.
        """
        other = copy.copy(self)
        other.runtime, other._derived = runtime, {}
        return other

    def with_gains(self, gains: Mapping[Any, float]) -> Self:
        """The same model, over which adapters are proven to gain so much."""
        other = copy.copy(self)
        other.gains = gains
        return other

    def with_hash(self, content_hash: str) -> Self:
        """The same model, whose states are others: those of a model that means something else by its answers."""
        other = copy.copy(self)
        other.content_hash = content_hash
        return other

    def with_layouts(self, *, frozen: bool, adapted: bool) -> Self:
        """The same model, some of whose passes keep images in channels_last, which may be faster.

        A network that depends on how its activations lie in memory, as `view` does, cannot take a batch so.

        Args:
            frozen: those without gradient that leave its convolutions as they are; these are packed on a CPU.
            adapted: the others.
        """
        other = copy.copy(self)
        other._layouts = Layouts.of(self._net, frozen=frozen, adapted=adapted)
        other._derived, other.graphs = {}, self.graphs.fresh()
        return other

    @property
    def offers(self) -> frozenset[str]:
        """What adapters may need: the source quantities present, and what the network has.

        That is "gradients", "classifier", "linear_classifier", "batch_norm" and "normalisation".

        "classifier" is there if features lead to the logits, "linear_classifier" if by a linear layer.
        "batch_norm" is there with a BatchNorm layer that can be adapted, "normalisation" also with a LayerNorm or
        GroupNorm. Without BatchNorm there are no "moments" to measure, so none are missing.
        """
        normalising = {"normalisation"} if self._norms or self.row_norms else set()
        classifier = {"classifier"} if self.classifier is not None else set()
        classifier |= {"linear_classifier"} if self.linear else set()
        statistics = {"batch_norm" if self._norms else "moments"}
        return self.source.present | {"gradients"} | classifier | statistics | normalising

    @property
    def dtype(self) -> torch.dtype:
        """Precision of the weights."""
        return self._last.dtype

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return self._last.device

    def derived(self, make: Callable[..., T], *arguments: Hashable) -> T:
        """What a function makes of this model and constants: computed once and kept, since a model never changes."""
        key = make, *arguments
        if key not in self._derived:
            self._derived[key] = make(self, *arguments)
        result: T = self._derived[key]
        return result

    def tensor(self, name: str) -> Tensor:
        """The global value of a module; never write to it."""
        return self._parameters[name] if name in self._parameters else self._buffers[name]

    def batch(self, x: Tensor) -> Tensor:
        """Check a batch and move it to the model's device and precision.

        Raises:
            InputError: x is empty, has no batch axis, is not of a floating type or not finite.
        """
        if x.dim() < 2 or x.shape[0] == 0:
            raise InputError(f"a batch holds at least one sample along its first axis; this one has shape {[*x.shape]}")
        if not x.is_floating_point():
            raise InputError(f"a batch holds normalised floating-point numbers, not {x.dtype}")
        x = x.to(self.device, self.dtype)
        if not finite(x):
            raise InputError("the batch holds NaN or infinite numbers")
        with torch.inference_mode(False):
            return x.clone() if x.is_inference() else x  # autograd refuses tensors made in inference mode

    def frozen(self, x: Tensor) -> Pass:
        """Features and logits of the unadapted model, without gradient.

        Graphs get it filled up to a power of two, so that few serve all sizes, if no row can depend on another.
        """
        if self.runtime is not None:
            return self.runtime(x)

        def pass_of(arguments: Sequence[Tensor]) -> Outcome:
            answer = self.adapted(arguments[0], {})
            return Outcome((answer.features, answer.logits))

        batch = filled(x) if self.graphs.active and not self.skipped else x
        features, logits = self.graphs.call("frozen", pass_of, (batch,)).tensors
        return Pass(features[: len(x)], logits[: len(x)])

    def adapted(self, x: Tensor, tensors: Mapping[str, Tensor]) -> Pass:
        """Features and logits with some modules replaced by other tensors, without gradient."""
        with torch.no_grad():
            return self.run(x, tensors)

    def forward(self, x: Tensor, tensors: Mapping[str, Tensor]) -> Tensor:
        """Logits [B, K] with some modules replaced by other tensors, without gradient."""
        return self.adapted(x, tensors).logits

    def features(self, x: Tensor, tensors: Mapping[str, Tensor] | None = None) -> Tensor:
        """Features [N, d] of any number of inputs, without gradient, in passes of bounded size.

        Raises:
            InputError: as `batch` and `run`.
        """
        chunks = torch.split(x, FEATURE_CHUNK)
        return torch.cat([self.adapted(self.batch(chunk), tensors or {}).features for chunk in chunks])

    def run(self, x: Tensor, tensors: Mapping[str, Tensor] | None = None, normalise: Normalise | None = None) -> Pass:
        """One pass with some modules replaced and, if given, another rule for the BatchNorm layers.

        Gradients flow to the replaced tensors if they require them and autograd is on. What takes the place of
        parameters in half precision may be in single: small steps are lost in half.

        Raises:
            InputError: the network cannot take a batch of this shape.
        """
        probe = Probe(normalise)
        tensors = tensors or {}
        if self._half:
            tensors = {name: tensor.to(self._half.get(name, tensor.dtype)) for name, tensor in tensors.items()}
        layout = self._layouts.of_pass(tensors)
        try:
            with layout.trees.replacing(tensors) as tree:
                logits = probe.run(tree, layout.laid_out(x))
        except (AcclimateError, torch.OutOfMemoryError, torch.AcceleratorError):
            raise
        except REFUSALS as error:
            raise InputError(f"the network cannot take a batch of shape {[*x.shape]}: {error}") from error
        features = logits if self.classifier is None else probe.features
        if features is None or logits.shape != (x.shape[0], self.classes):
            end = (
                "logits [B, K]"
                if self.classifier is None
                else f"its classifier {self.classifier!r}: features [B, d] to logits [B, K]"
            )
            raise ConfigurationError(f"the network must end in {end}")
        return Pass(features, logits)

    def _anchor_features(self) -> AnchorFeatures | None:
        if self.source.anchors is None:
            return None
        inputs, labels = self.source.anchors
        try:
            labels = class_labels(labels, len(inputs), self.classes)
            return AnchorFeatures(self.features(inputs), labels.to(self.device))
        except InputError as error:
            raise ConfigurationError(f"source.anchors cannot be used: {error}") from error


def require_finite(logits: Tensor) -> Tensor:
    """Pass logits through.

    Raises:
        NumericalError: some are not finite.
    """
    if not finite(logits):
        raise NumericalError("the model answered with non-finite logits")
    return logits
