"""What was learned or measured before deployment, shared by all clients."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from acclimate_adapters.errors import ConfigurationError

TOLERANCE = 1e-3  # probabilities stored in single or half precision still sum to 1 within this
SMALLEST_PRIOR = torch.finfo(torch.float32).tiny  # below it single precision, in which priors are compared, has only 0


class Anchors(NamedTuple):
    """A few labelled source examples that may be shipped with the model (Fed-ADE)."""

    inputs: Tensor  # [N, C, H, W], normalised as the model sees them
    labels: Tensor  # [N], int64 in 0..K-1


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Quantities of the training side. Only `prior` is required; an adapter says which others it needs.

    Args:
        prior: p_s [K], the class prior of training; positive, sums to 1.
        rates: adaptation rate alpha of each module by tensor name (ATP); any finite number, negative ones included. A
            module without an entry has rate 0. None when no rates were learned.
        confusion: [K, K], M[i, j] = P(predicted i | true j): no entry is negative and columns sum to 1; a column of
            zeros stands for a class that no measured row had. A mapping with the keys "soft" (mean softmax) and "hard"
            (argmax counts) gives each estimator its own; a single matrix serves both.
        prototypes: [K, d], mean feature of each class.
        descriptor: [d], mean feature over the source clients (FedTHE's h^g).
        anchors: labelled source examples.
        moments: `<BN layer>.class_mean|class_square|row_var` to tensors of shape [K, C], [K, C] and [C].

    Raises:
        ConfigurationError: a quantity is not finite, its shape does not fit the prior, or it is not what it is said to
            be: a prior that is no distribution, a confusion matrix by rows.
    """

    prior: Tensor
    rates: Mapping[str, float] | None = None
    confusion: Tensor | Mapping[str, Tensor] | None = None
    prototypes: Tensor | None = None
    descriptor: Tensor | None = None
    anchors: Anchors | None = None
    moments: Mapping[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Turn arrays into tensors of their own and refuse what no adapter could use."""
        own = {name: torch.as_tensor(value).clone() for name, value in self._plain_tensors().items()}
        for name, value in own.items():
            object.__setattr__(self, name, value)
        if self.rates is not None:
            object.__setattr__(self, "rates", MappingProxyType(dict(self.rates)))
        if isinstance(self.confusion, Mapping):
            matrices = {mode: torch.as_tensor(matrix).clone() for mode, matrix in self.confusion.items()}
            object.__setattr__(self, "confusion", MappingProxyType(matrices))
        if self.anchors is not None:
            object.__setattr__(self, "anchors", Anchors._make(map(torch.as_tensor, self.anchors)))
        moments = {name: torch.as_tensor(value) for name, value in self.moments.items()}
        object.__setattr__(self, "moments", MappingProxyType(moments))
        _check(self)

    def _plain_tensors(self) -> dict[str, Tensor]:
        values = {name: getattr(self, name) for name in ("prior", "confusion", "prototypes", "descriptor")}
        return {name: v for name, v in values.items() if v is not None and not isinstance(v, Mapping)}

    @property
    def present(self) -> frozenset[str]:
        """Names of the quantities that are there."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        empty = {name for name, v in values.items() if v is None or (name == "moments" and not v)}
        return frozenset(values.keys() - empty)

    def confusion_matrix(self, mode: str) -> Tensor:
        """The confusion matrix [K, K] that matches a query of that mode, "soft" or "hard".

        Raises:
            ConfigurationError: there is no matrix for that mode.
        """
        if isinstance(self.confusion, Mapping):
            if mode in self.confusion:
                return self.confusion[mode]
        elif self.confusion is not None:
            return self.confusion
        raise ConfigurationError(f"the source carries no {mode} confusion matrix")

    def tensors(self) -> dict[str, Tensor]:
        """All tensors by a flat name; the inverse of what a bundle stores beside the rates."""
        flat = self._plain_tensors()
        if isinstance(self.confusion, Mapping):
            flat |= {f"confusion.{mode}": matrix for mode, matrix in self.confusion.items()}
        if self.anchors is not None:
            flat |= {"anchors.inputs": self.anchors.inputs, "anchors.labels": self.anchors.labels}
        return flat | {f"moments.{name}": value for name, value in self.moments.items()}


def _check(source: Source) -> None:
    for name, tensor in source.tensors().items():
        if not bool(torch.isfinite(tensor).all()):
            raise ConfigurationError(f"source.{name} holds non-finite numbers")
    prior = source.prior
    if prior.dim() != 1 or len(prior) < 2:
        raise ConfigurationError(
            f"source.prior needs one entry per class, at least 2; it has shape {list(prior.shape)}"
        )
    if bool((prior <= 0).any()) or abs(float(prior.sum()) - 1) > TOLERANCE:
        raise ConfigurationError(
            "source.prior must be positive and sum to 1: a class that was never trained on has none"
        )
    if float(prior.min()) < SMALLEST_PRIOR:
        raise ConfigurationError(
            f"source.prior gives class {int(prior.argmin())} {float(prior.min()):.1e}, which is 0 in single precision: "
            "leave the class out, or give it what one row of it counts"
        )
    k = len(prior)
    for name, shape in {"prototypes": (k, None), "confusion": (k, k), "descriptor": (None,)}.items():
        _check_shape(source, name, shape)
    _check_confusion(source)
    for module, rate in (source.rates or {}).items():
        if not math.isfinite(rate):
            raise ConfigurationError(f"the adaptation rate of {module} is {rate}")
    if source.anchors is not None and len(source.anchors.inputs) != len(source.anchors.labels):
        raise ConfigurationError("source.anchors needs one label per input")


def _check_shape(source: Source, name: str, shape: tuple[int | None, ...]) -> None:
    for key, tensor in source.tensors().items():
        if key.split(".")[0] != name:
            continue
        fits = tensor.dim() == len(shape) and all(w in (None, g) for w, g in zip(shape, tensor.shape, strict=True))
        if not fits:
            wanted = [size if size is not None else "any" for size in shape]
            raise ConfigurationError(f"source.{key} has shape {list(tensor.shape)}, expected {wanted}")


def _check_confusion(source: Source) -> None:
    """Refuse what is no confusion matrix by columns; `bbse` and `fed_ade` would invert it all the same."""
    for key, matrix in source.tensors().items():
        if key.split(".")[0] != "confusion":
            continue
        columns, rows = (_distributions(side) for side in (matrix.T, matrix))
        if not columns:
            hint = "; its rows do: transpose it" if rows else ""
            raise ConfigurationError(
                f"source.{key} holds P(predicted i | true j): no entry is negative and each column sums to 1, or to 0 "
                f"for a class without rows{hint}"
            )


def _distributions(rows: Tensor) -> bool:
    """Whether each row of a matrix is a distribution, or zero."""
    sums = rows.double().sum(dim=1)
    return bool((rows >= 0).all()) and bool((((sums - 1).abs() <= TOLERANCE) | (sums == 0)).all())
