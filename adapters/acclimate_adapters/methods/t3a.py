"""T3A: class templates from the most confident features (Iwasawa and Matsuo, NeurIPS 2021)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from acclimate_adapters.adapter import Step
from acclimate_adapters.errors import StateMismatch
from acclimate_adapters.functional import entropy
from acclimate_adapters.hyperparameters import check, integer
from acclimate_adapters.network.model import FrozenModel, Pass, require_finite
from acclimate_adapters.state import State

Tensors = Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class T3a:
    """Replace the classifier by templates, one per class: the mean direction of confident features of that class.

    Method (equations numbered here):
        f      feature of an image; logits = W f + b; its pseudo-class is their argmax, its entropy H that of softmax
        S_k    supports of class k: the rows of W, classed by the head like features, and the features so far (1)
        filter keep in each S_k the `filter_k` supports of lowest H; of equal ones, the older              (2)
        c_k    = u / |u|, u = sum of z / |z| over z in S_k                                             (3)
        score  = f . c_k, f as it is                                                                   (4)
        A batch joins the supports, is filtered, and is then answered: its images influence each other.

    Departures:
        `filter_k` is finite. Supports dropped by the filter can never return, so the state holds all that matters.
        `logits` are the scores: similarities, whose softmax is no calibrated probability. A class without a support
        scores 0, as in the authors' program.

    Args:
        filter_k: supports per class, 1..100 (the paper's grid).

    Raises:
        StateMismatch: `step`, the state was made with another `filter_k`.

    Reference: Iwasawa, Matsuo: "Test-time classifier adjustment module for model-agnostic domain generalization",
    NeurIPS 2021.
    """

    name: ClassVar[str] = "t3a"
    layout: ClassVar[int] = 1
    needs: ClassVar[frozenset[str]] = frozenset()

    filter_k: int = integer(20, low=1, high=100, doc="supports of lowest entropy that each class keeps")

    def __post_init__(self) -> None:
        """Refuse hyper-parameters out of range."""
        check(self)

    def init(self, model: FrozenModel) -> State:
        """The state of a client that has sent nothing yet: supports [K, filter_k, d] that hold the rows of W (1)."""
        weight = model.tensor(f"{model.classifier}.weight")
        bias = model.tensor(f"{model.classifier}.bias") if f"{model.classifier}.bias" in model.modules else None
        k, d = weight.shape
        empty = {
            "supports": weight.new_zeros(k, self.filter_k, d),
            "entropies": weight.new_zeros(k, self.filter_k),
            "counts": torch.zeros(k, dtype=torch.int64, device=weight.device),
        }
        tensors = add_supports(empty, weight, F.linear(weight, weight, bias))
        return State(self.name, self.layout, model.content_hash, tensors=tensors)

    def step(self, model: FrozenModel, state: State, x: Tensor) -> Step:
        """Answer the batch x [B, C, H, W]; raises InputError and StateMismatch as `Adapter.step`."""
        return self.on_frozen(model, state, model.frozen(model.batch(x)))

    def on_frozen(self, model: FrozenModel, state: State, frozen: Pass) -> Step:
        """Answer the batch of a frozen pass, as `FrozenOnly.on_frozen`."""
        state.require(self.name, self.layout, model.content_hash)
        if state.tensors["supports"].shape[1] != self.filter_k:
            raise StateMismatch(f"the state was not made by filter_k={self.filter_k}")
        require_finite(frozen.logits)
        held = {name: tensor.to(model.device) for name, tensor in state.tensors.items()}
        new = add_supports(held, frozen.features, frozen.logits)
        scores = require_finite(frozen.features @ templates(new["supports"]).T)
        signals = {
            "entropy": float(entropy(scores).mean()),
            "frozen_entropy": float(entropy(frozen.logits).mean()),
            "supports": float(new["counts"].sum()),
            "classes_without_support": float((new["counts"] == 0).sum()),
        }
        return Step(scores, state.next(new), signals, frozen.logits, frozen.features)


def add_supports(held: Tensors, features: Tensor, logits: Tensor) -> dict[str, Tensor]:
    """The supports after some more features came, (1) and (2).

    Args:
        held: supports [K, S, d] of unit length and their entropies [K, S], both in rising order of entropy and zero
            beyond the counts [K].
        features: [B, d].
        logits: [B, K], what the classifier says of them.

    Returns:
        New tensors like `held`.
    """
    k, size, d = held["supports"].shape
    classes, slots = (torch.arange(n, device=features.device) for n in (k, size))
    old = held["entropies"].masked_fill(slots >= held["counts"][:, None], torch.inf)
    new = torch.where(logits.argmax(dim=1) == classes[:, None], entropy(logits), torch.inf)  # [K, B]
    entropies, order = torch.cat([old, new], dim=1).sort(dim=1, stable=True)
    entropies, order = entropies[:, :size], order[:, :size]
    pool = torch.cat([held["supports"].reshape(-1, d), F.normalize(features, dim=1)])
    kept = pool[torch.where(order < size, classes[:, None] * size + order, (k - 1) * size + order)]
    vacant = entropies.isinf()
    return {
        "supports": kept.masked_fill(vacant[:, :, None], 0),
        "entropies": entropies.masked_fill(vacant, 0),
        "counts": (~vacant).sum(dim=1),
    }


def templates(supports: Tensor) -> Tensor:
    """Template of each class, [K, d], of unit length or zero, from unit supports [K, S, d] (3)."""
    return F.normalize(supports.sum(dim=1), dim=1)
