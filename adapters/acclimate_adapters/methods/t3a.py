"""T3A: class templates from the most confident features (Iwasawa and Matsuo, NeurIPS 2021)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from acclimate_adapters.adapter import Step, require, require_state
from acclimate_adapters.functional import at_least_float32, entropy
from acclimate_adapters.guard import norm_capped
from acclimate_adapters.hyperparameters import check, integer
from acclimate_adapters.network.model import FrozenModel, Pass, require_finite
from acclimate_adapters.state import Form, State, count

Tensors = Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class T3a:
    """Replace the classifier by templates, one per class: the mean direction of confident features of that class.

    Method (equations numbered here):
        f      feature of an image; logits = W f + b; its pseudo-class is their argmax, its entropy H that of softmax
        S_k    supports of class k: the rows of W, classed by the head like features, and the features so far (1)
        filter keep in each S_k the `filter_k` supports of lowest H, of equal ones the older; all with 0   (2)
        c_k    = u / |u|, u = sum of z / |z| over z in S_k                                             (3)
        score  = f . c_k, f as it is                                                                   (4)
        A batch joins the supports, is filtered, and is then answered: its images influence each other.

    Departures:
        Supports dropped by the filter can never return, so the state holds all that matters. Without a filter it holds
        the sums u alone, which all supports enter.
        `logits` are the scores: similarities, whose softmax is no calibrated probability. A class without a support
        scores 0, as in the authors' program.

    Args:
        filter_k: supports per class, 1..100, or 0 for no filter (the paper's grid).

    Raises:
        StateMismatch: `step`, the state was made with another `filter_k`.

    Reference: Iwasawa, Matsuo: "Test-time classifier adjustment module for model-agnostic domain generalization",
    NeurIPS 2021.
    """

    name: ClassVar[str] = "t3a"
    layout: ClassVar[int] = 1
    needs: ClassVar[frozenset[str]] = frozenset({"linear_classifier"})
    uncorrectable: ClassVar[str] = "similarities to templates, which are no probabilities of classes"

    filter_k: int = integer(20, low=0, high=100, doc="supports of lowest entropy that each class keeps; 0 keeps all")

    def __post_init__(self) -> None:
        """Refuse hyper-parameters out of range."""
        check(self)

    def init(self, model: FrozenModel) -> State:
        """The state of a client that has sent nothing yet, whose supports are the rows of W (1).

        Raises:
            MissingSource: the classifier of the model is not linear.
        """
        require(self, model)
        weight = model.tensor(f"{model.classifier}.weight")
        bias = model.tensor(f"{model.classifier}.bias") if f"{model.classifier}.bias" in model.modules else None
        k, d = weight.shape
        empty = {"counts": torch.zeros(k, dtype=torch.int64, device=weight.device)}
        if self.filter_k == 0:
            empty["sums"] = at_least_float32(weight).new_zeros(k, d)
        else:
            empty["supports"] = weight.new_zeros(k, self.filter_k, d)
            empty["entropies"] = weight.new_zeros(k, self.filter_k)
        tensors = self._add(empty, weight, F.linear(weight, weight, bias))
        return State(self.name, self.layout, model.content_hash, tensors=tensors)

    def form(self, model: FrozenModel, state: State) -> dict[str, Form]:
        """The supports of each class or, without a filter, their sum, and how many they are, as `Adapter.form`."""
        k, d = model.classes, model.feature_size
        dtypes = model.dtype, torch.promote_types(model.dtype, torch.float32)
        if self.filter_k == 0:
            return {"sums": Form((k, d), dtypes), "counts": count(k)}
        return {
            "supports": Form((k, self.filter_k, d), dtypes),
            "entropies": Form((k, self.filter_k), dtypes),
            "counts": count(k, high=self.filter_k),
        }

    def step(self, model: FrozenModel, state: State, x: Tensor) -> Step:
        """Answer the batch x [B, C, H, W]; raises InputError and StateMismatch as `Adapter.step`."""
        return self.on_frozen(model, state, model.frozen(model.batch(x)))

    def on_frozen(self, model: FrozenModel, state: State, frozen: Pass) -> Step:
        """Answer the batch of a frozen pass, as `FrozenOnly.on_frozen`."""
        require_state(self, model, state)
        require_finite(frozen.logits)
        held = {name: tensor.to(model.device) for name, tensor in state.tensors.items()}
        new = self._add(held, frozen.features, frozen.logits)
        sums = new["sums"] if self.filter_k == 0 else new["supports"].sum(dim=1)
        scores = require_finite(frozen.features @ F.normalize(sums, dim=1).to(frozen.features).T)  # (3), (4)
        signals = {
            "entropy": float(entropy(scores).mean()),
            "frozen_entropy": float(entropy(frozen.logits).mean()),
            "supports": float(new["counts"].sum()),
            "classes_without_support": float((new["counts"] == 0).sum()),
        }
        return Step(scores, state.next(new), signals, frozen.logits, frozen.features)

    def bounded(self, model: FrozenModel, before: State, after: State, rows: int, influence: float) -> State:
        """As `Bounding.bounded`: the filter bounds what a batch can do; without it, the sums are capped."""
        return after if self.filter_k else norm_capped(self, model, before, after, influence)

    def _add(self, held: Tensors, features: Tensor, logits: Tensor) -> dict[str, Tensor]:
        return (add_to_sums if self.filter_k == 0 else add_supports)(held, features, logits)


def add_to_sums(held: Tensors, features: Tensor, logits: Tensor) -> dict[str, Tensor]:
    """The sums of all supports after some more features came (1).

    Args:
        held: sums [K, d] of unit vectors, and counts [K] of them.
        features: [B, d].
        logits: [B, K], what the classifier says of them.

    Returns:
        New tensors like `held`.
    """
    members = F.one_hot(logits.argmax(dim=1), len(held["counts"]))  # [B, K]
    units = F.normalize(features, dim=1).to(held["sums"])
    return {"counts": held["counts"] + members.sum(dim=0), "sums": held["sums"] + members.T.to(units) @ units}


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
