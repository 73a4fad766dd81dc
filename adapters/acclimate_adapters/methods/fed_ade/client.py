"""Fed-ADE: a learning rate set by the estimated distribution shift (Park et al., 2026)."""

import math
from collections.abc import Generator
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from acclimate_adapters.adapter import Signal, Step, complete, require, require_state
from acclimate_adapters.cost import Cost, forward_pass, gradient_pass, head_step
from acclimate_adapters.errors import ConfigurationError
from acclimate_adapters.functional import at_least_float32, entropy, keyed_generator
from acclimate_adapters.hyperparameters import check, choice, integer, real
from acclimate_adapters.methods.bbse import mean_prediction, measured_confusion
from acclimate_adapters.methods.fed_ade.risk import (
    LabelEstimate,
    anchor_importance,
    anchors_of,
    estimate_labels,
    fit_head,
    minibatches,
)
from acclimate_adapters.methods.priors import log_posteriors
from acclimate_adapters.network.model import FrozenModel, Pass, require_finite
from acclimate_adapters.state import Form, State, count

PERSONAL, SHARED = "personal.", "shared."  # prefixes of the modules in a state; no other tensor's name has a dot
LARGEST_RATE = 10.0  # of learning
NO_DIRECTION = 1e-12  # a vector shorter than this has no direction


@dataclass(frozen=True, slots=True)
class FedAde:
    """Train on labelled anchors, weighted to the client's estimated labels, at a rate set by how much it drifts.

    Method, timestep t being a batch:
        q_t    mean softmax of the batch under the client's current layers, q_0 uniform            (Eq. 11)
        z_t    mean L2-normalised feature of the batch, z_0 of the anchors                         (Eq. 13)
        S_unc  = 1 - cos(q_t-1, q_t)                                                               (Eq. 12)
        S_rep  = (1 - cos(z_t-1, z_t)) / 2                                                         (Eq. 14)
        S      = (S_unc + S_rep) / 2                                                               (Eq. 10)
        eta    = `eta_min` + (`eta_max` - `eta_min`) S                                             (Eq. 9)
        risk   = sum_i w_i F_i, w = M^-1 q_t, F_i the mean cross-entropy of the anchors of class i (Eq. 4);
               M is `Source.confusion`, the anchors are `Source.anchors`
        phi    the personalised layers, here the classifier; psi the shared layers, all others
        head   psi stays frozen, where Eq. 6 and Eq. 8 are one update: phi <- phi - eta grad risk, for `epochs` +
               `personal_epochs` passes over the anchors; logits are predicted after it, on the same batch
        all    rounds across clients, `fed_ade_rounds`, update psi and phi (Eq. 6 to 8, Algorithm 1); a step measures
               what the next rounds need and answers with the client's layers as the last round left them

    Departures:
        The default is `layers="head"`, which one client can do alone; the paper's algorithm is "all".
        F_i comes from anchors shipped with the model; the paper supposes labelled initial data at each client.
        w minimises |M w - q_t| among probability vectors; M^-1 q_t may be negative, which ascends the loss of a class.
        `weights="raw"` is the paper's form. Beyond a condition number of 1000 w is the source prior.
        Classes without anchors lose their weight, the others share it.
        eta is `eta_min` where a cosine is undefined (features of length 0); such samples are left out of z_t.
        Drift is measured once per batch, not once per round: from the second round on, the paper's loop would compare
        a batch with itself.
        Where the paper is silent: minibatches of anchors estimate Eq. 4 without bias; BatchNorm stays in evaluation
        mode and its statistics are not part of psi.

    Args:
        eta_min, eta_max: bounds of the learning rate (the paper's for images).
        weights: "simplex" or "raw", how the labels are estimated.
        layers: "head" adapts the classifier alone; "all" takes part in rounds.
        mode: "soft" estimates labels from mean softmax, "hard" from predicted classes, each with the matching matrix.
        epochs: passes over the anchors in Eq. 6.
        personal_epochs: passes over the anchors in Eq. 8.
        batch_size: anchors per minibatch.
        seed: of the minibatch order.

    Reference: Park, Joe, Kim, Im, Kwon: "Fed-ADE: Adaptive Learning Rate for Federated Post-adaptation under
    Distribution Shift", arXiv:2603.01040, 2026.
    """

    name: ClassVar[str] = "fed_ade"
    layout: ClassVar[int] = 1
    uncorrectable: ClassVar[str] = "fitted to the client's class prior already"

    eta_min: float = real(5e-6, low=0.0, high=LARGEST_RATE, doc="learning rate without drift")
    eta_max: float = real(1e-4, low=0.0, high=LARGEST_RATE, doc="learning rate at the largest drift")
    weights: str = choice("simplex", "raw", doc="simplex keeps the estimated labels a distribution; raw is the paper's")
    layers: str = choice("head", "all", doc="head adapts the classifier alone; all takes part in federated rounds")
    mode: str = choice("soft", "hard", doc="labels are estimated from mean softmax (soft) or predicted classes (hard)")
    epochs: int = integer(4, low=0, high=1000, doc="passes over the anchors, shared layers included where they adapt")
    personal_epochs: int = integer(1, low=0, high=1000, doc="further passes over the anchors for the head alone")
    batch_size: int = integer(32, low=1, high=65536, doc="anchors per minibatch")
    seed: int = integer(0, low=0, high=2**31 - 1, doc="order of the minibatches")

    def __post_init__(self) -> None:
        """Refuse hyper-parameters out of range."""
        check(self)
        if self.eta_min > self.eta_max:
            raise ConfigurationError(f"eta_min={self.eta_min} exceeds eta_max={self.eta_max}")

    @property
    def needs(self) -> frozenset[str]:
        """Anchors, confusion matrix, prior and a linear classifier; in rounds also gradients of all layers."""
        always = {"anchors", "confusion", "prior", "linear_classifier"}
        return frozenset({*always, *(("gradients",) if self.layers == "all" else ())})

    def init(self, model: FrozenModel) -> State:
        """The state of a client that has sent nothing yet: uniform q, z of the anchors, the global layers.

        Raises:
            MissingSource: the model lacks anchors or a confusion matrix.
            ConfigurationError: it carries no confusion matrix for this mode.
        """
        require(self, model)
        model.source.confusion_matrix(self.mode)  # a missing one is an error now, not at the first batch
        features = at_least_float32(anchors_of(model).features)
        uniform = features.new_full((model.classes,), 1 / model.classes)
        tensors = {"q": uniform, "z": mean_unit_feature(features)}
        tensors |= {PERSONAL + name: at_least_float32(model.tensor(name)) for name in head_modules(model)}
        if self.layers == "all":
            tensors |= {SHARED + name: tensor for name, tensor in global_layers(model).items()}
            tensors |= timestep_tensors(self.eta_min, 0, model.source.prior)
        return State(self.name, self.layout, model.content_hash, tensors=tensors)

    def form(self, model: FrozenModel, state: State) -> dict[str, Form]:
        """The summaries of the last batch and the client's layers, as `Adapter.form`."""
        dtypes = (torch.promote_types(model.dtype, torch.float32),)
        forms = {"q": Form((model.classes,), dtypes, low=0), "z": Form((model.feature_size,), dtypes)}
        layers = {PERSONAL: head_modules(model), SHARED: shared_modules(model) if self.layers == "all" else ()}
        for prefix, names in layers.items():  # states of before hold those of a half precision model as they are there
            forms |= {prefix + name: Form.of(model.tensor(name), torch.float32) for name in names}
        if self.layers == "all":
            forms |= {"eta": Form((), (torch.float64,), 0, LARGEST_RATE), "samples": count()}
            forms["labels"] = Form((model.classes,), (torch.float64,))
        return forms

    def cost(self, model: FrozenModel, rows: int) -> Cost:
        """Forward, and the passes over the anchors, of this step or of the round that follows, as `Costly.cost`."""
        anchors = len(anchors_of(model).labels)
        size, steps = min(self.batch_size, anchors), math.ceil(anchors / self.batch_size)
        epoch = (gradient_pass if self.layers == "all" else head_step)(size).times(steps)
        personal = head_step(size).times(steps)
        return forward_pass(rows).and_also(epoch.times(self.epochs), personal.times(self.personal_epochs))

    def step(self, model: FrozenModel, state: State, x: Tensor) -> Step:
        """Answer the batch x [B, C, H, W]; raises InputError and StateMismatch as `Adapter.step`."""
        return complete(self.slices(model, state, x))

    def slices(self, model: FrozenModel, state: State, x: Tensor) -> Generator[None, None, Step]:
        """The step with a pause after each pass over the anchors, as `Sliced.slices`."""
        head, shared = self.client_layers(model, state)
        x = model.batch(x)
        if self.layers == "all":
            return self._measure_and_answer(model, state, model.adapted(x, {**shared, **head}))
        return (yield from self._adapt_head(model, state, head, model.frozen(x)))

    def bounded(self, model: FrozenModel, before: State, after: State, rows: int, influence: float) -> State:
        """As it is: `eta_max` bounds how far a batch moves the head, and the summaries are those of one batch."""
        return after

    def moved(self, model: FrozenModel, state: State) -> dict[str, Tensor]:
        """The client's layers against the global ones, as `Moving.moved`."""
        head, shared = self.client_layers(model, state)
        return {name: tensor - model.tensor(name) for name, tensor in {**head, **shared}.items()}

    def client_layers(self, model: FrozenModel, state: State) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Personalised and shared modules of a state by name, on the model's device, in single precision at least.

        Small steps are lost in half.

        Raises:
            StateMismatch: the state was made for something else.
        """
        require_state(self, model, state)
        personal, shared = head_modules(model), shared_modules(model) if self.layers == "all" else ()
        return (
            {name: at_least_float32(state.tensors[PERSONAL + name].to(model.device)) for name in personal},
            {name: at_least_float32(state.tensors[SHARED + name].to(model.device)) for name in shared},
        )

    def _adapt_head(
        self, model: FrozenModel, state: State, head: dict[str, Tensor], frozen: Pass
    ) -> Generator[None, None, Step]:
        features = at_least_float32(frozen.features)
        before = require_finite(F.linear(features, *head.values()))
        t = self._measure(model, state, before, frozen.features)
        anchors = anchors_of(model)
        importance = anchor_importance(t.estimate.labels, anchors.labels)
        order = keyed_generator(self.seed, state.step)
        for _ in range(self.epochs + self.personal_epochs):
            rows = minibatches(len(importance), self.batch_size, 1, order)
            head = fit_head(head, anchors, importance, t.eta, rows)
            yield
        logits = require_finite(F.linear(features, *head.values()).to(model.dtype))
        new = {"q": t.drift.q, "z": t.drift.z, **{PERSONAL + name: tensor for name, tensor in head.items()}}
        return Step(logits, state.next(new), t.signals(logits), frozen.logits, frozen.features)

    def _measure_and_answer(self, model: FrozenModel, state: State, answer: Pass) -> Step:
        logits = require_finite(answer.logits)
        t = self._measure(model, state, logits, answer.features)
        new = {"q": t.drift.q, "z": t.drift.z, **timestep_tensors(t.eta, len(logits), t.estimate.labels)}
        return Step(logits, state.next({**state.tensors, **new}), t.signals(logits), features=answer.features)

    def _measure(self, model: FrozenModel, state: State, logits: Tensor, features: Tensor) -> "Timestep":
        q, z = (state.tensors[name].to(model.device) for name in ("q", "z"))
        drift = measure_drift(q, z, logits, features)
        query = mean_prediction(log_posteriors(logits), self.mode)
        confusion = model.derived(measured_confusion, self.mode)
        estimate = estimate_labels(confusion, query, model.source.prior, constrained=self.weights == "simplex")
        without_anchors = int((torch.bincount(anchors_of(model).labels, minlength=model.classes) == 0).sum())
        return Timestep(drift, drift.learning_rate(self.eta_min, self.eta_max), estimate, without_anchors)


class Drift(NamedTuple):
    """How a batch differs from the one before."""

    q: Tensor  # [K], the summaries that the next batch is compared with
    z: Tensor  # [d]
    uncertainty: float  # S_unc, 0..1
    representation: float  # S_rep, 0..1; 0 when undefined
    defined: bool  # whether both have a value

    @property
    def shift(self) -> float:
        """S in 0..1 (Eq. 10); rounding may not push it beyond."""
        return min((self.uncertainty + self.representation) / 2, 1.0)

    def learning_rate(self, low: float, high: float) -> float:
        """Eta (Eq. 9); `low` when the shift is undefined."""
        return low + (high - low) * self.shift if self.defined else low


class Timestep(NamedTuple):
    """All that one batch decides."""

    drift: Drift
    eta: float
    estimate: LabelEstimate
    classes_without_anchors: int

    def signals(self, logits: Tensor) -> dict[str, Signal]:
        """What the step reports, with the logits [B, K] of its answer."""
        return {
            "entropy": float(entropy(logits).mean()),
            "shift": self.drift.shift,
            "uncertainty_shift": self.drift.uncertainty,
            "representation_shift": self.drift.representation,
            "shift_undefined": float(not self.drift.defined),
            "learning_rate": self.eta,
            "prior": tuple(self.estimate.labels.tolist()),
            "condition": self.estimate.condition,
            "refused": float(self.estimate.refused),
            "absent_classes": float(self.estimate.absent_classes),
            "classes_without_anchors": float(self.classes_without_anchors),
        }


def head_modules(model: FrozenModel) -> tuple[str, ...]:
    """Names of phi: weight and, if there is one, bias of the classifier, in the order `linear` takes them."""
    return tuple(n for n in (f"{model.classifier}.weight", f"{model.classifier}.bias") if n in model.modules)


def shared_modules(model: FrozenModel) -> tuple[str, ...]:
    """Names of psi: all parameters but the classifier's, in the order of the network."""
    head = head_modules(model)
    return tuple(name for name in model.parameters if name not in head)


def global_layers(model: FrozenModel) -> dict[str, Tensor]:
    """Psi of the global model by name, in single precision at least."""
    return {name: at_least_float32(model.tensor(name)) for name in shared_modules(model)}


def timestep_tensors(eta: float, samples: int, labels: Tensor) -> dict[str, Tensor]:
    """What the rounds after a batch need of it: eta, its size N_c^t (Eq. 7) and the weights w [K] (Eq. 4)."""
    double = torch.tensor(eta, dtype=torch.float64)
    return {"eta": double, "samples": torch.tensor(samples), "labels": labels.to("cpu", torch.float64)}


def mean_unit_feature(features: Tensor) -> Tensor:
    """Mean L2-normalised feature z [d] of features [B, d] (Eq. 13); 0 when none of them has a direction."""
    lengths = torch.linalg.vector_norm(features, dim=-1, keepdim=True)
    kept = lengths > NO_DIRECTION
    directions = features / lengths.clamp_min(NO_DIRECTION) * kept
    return torch.div(directions.sum(0), kept.sum().clamp_min(1))


def cosine_distance(a: Tensor, b: Tensor) -> float | None:
    """1 - cos(a, b) of two vectors, in 0..2; None when one of them has no direction.

    Computed as half the squared distance of the unit vectors, which is exact where they agree.
    """
    lengths = [float(torch.linalg.vector_norm(v)) for v in (a, b)]
    if min(lengths) <= NO_DIRECTION:
        return None
    return float((a / lengths[0] - b / lengths[1]).square().sum()) / 2


def measure_drift(q_before: Tensor, z_before: Tensor, logits: Tensor, features: Tensor) -> Drift:
    """Summaries of a batch and their distance from the ones before (Eq. 11 to 14).

    Args:
        q_before: [K].
        z_before: [d]; 0 when no features had a direction so far.
        logits: [B, K], under the client's current layers.
        features: [B, d].

    Returns:
        The drift. A z without direction is not kept: the next batch is compared with the last one that had any.
    """
    q, z = at_least_float32(logits).softmax(-1).mean(0), mean_unit_feature(at_least_float32(features))
    uncertainty, representation = cosine_distance(q_before, q), cosine_distance(z_before, z)
    defined = uncertainty is not None and representation is not None
    kept = z if float(torch.linalg.vector_norm(z)) > NO_DIRECTION else z_before
    return Drift(q, kept, uncertainty or 0.0, (representation or 0.0) / 2, defined)
