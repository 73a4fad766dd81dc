"""FedCal: the class prior of a client's recent rows, from past predictions or features (Xu and Huang, 2023)."""

import math
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from acclimate_adapters.adapter import Signal, Step, require_state
from acclimate_adapters.cost import Cost, forward_pass, posterior_sweep
from acclimate_adapters.errors import MissingSource
from acclimate_adapters.functional import class_labels
from acclimate_adapters.hyperparameters import check, choice, integer, real
from acclimate_adapters.labels import Labelled
from acclimate_adapters.methods.priors import (
    FLOOR,
    correct_frozen,
    corrected,
    floored,
    log_posteriors,
    maximise_likelihood,
    source_prior,
)
from acclimate_adapters.methods.ring import Ring
from acclimate_adapters.methods.simplex import LARGEST_CONDITION, condition_number, nearest_mixture
from acclimate_adapters.network.model import FrozenModel, Pass
from acclimate_adapters.state import Form, State, count

EM_STEPS, EM_TOLERANCE = 100, 1e-4
RIDGE = 1e-3  # of the mean squared norm of a prototype


class Prototypes(NamedTuple):
    """Class prototypes made ready for estimation."""

    columns: Tensor  # [d, classes with a prototype], double precision on the CPU
    measured: Tensor  # [K], bool, the classes with a prototype
    condition: float  # condition number of the columns; 1 without any
    ridge: float  # what keeps ill-conditioned columns apart


class Estimate(NamedTuple):
    """An estimated prior."""

    raw: Tensor  # [K], sums to 1, may hold zeros
    prior: Tensor  # [K], the same, kept away from zeros by pseudo-counts where the estimator has them
    signals: dict[str, Signal]


@dataclass(frozen=True, slots=True)
class FedCal:
    """Correct the predictions for the class prior of the client's last `window` rows.

    Method:
        p_s    training prior (`Source.prior`);  p_t  prior of the client, by `estimator`:
        pl     shares of the predicted classes among the rows of the window                       (Eq. 6)
        em     maximum likelihood of those rows: from p_t = p_s, until a step moves p_t by less than
               1e-4 (L1), at most 100 steps                                                       (Eq. 8, 9)
        fm     p_t on the simplex that minimises |C^T p_t - f|^2, C the class prototypes (`Source.prototypes`), f the
               mean feature of the window                                                         (Eq. 10)
        window holds the uncorrected log-posteriors, or for fm the features                       (section 4.4)
        logits = log p_s(.|x_i) + log p_t - log p_s, normalised                                   (Eq. 5)

    Departures:
        Eq. 5 as printed leaves rows that do not sum to 1; they are normalised.
        The paper assumes a uniform p_s after balanced training; here Eq. 8 divides by p_s and EM starts there.
        `apply` current uses the batch's own rows as well; the paper estimates after each slot for the next one (next).
        True labels, where `learn` is told some, count as `label_weight` rows each: with n_k of class k among the last
        `window` of them, pl and em add `label_weight` n_k to the rows of class k (see `labels`), and fm averages its
        estimate, of as many rows as the window holds, with the labels' shares.
        pl adds `pseudo_count` rows spread like p_s, and no class falls below 1e-6: a class not seen yet stays possible.
        fm: raw features; ill-conditioned prototypes (condition number above 1e3, always so when K > d) get a ridge of
        1e-3 of their mean squared norm; a class without prototype (zeros) keeps its training prior.
        Rectification is off: it presumes clients with few, equally frequent classes. A rectified class gets 1e-6.

    Args:
        estimator: "pl", "em" or "fm".
        window: rows remembered.
        apply: "current" or "next".
        rectify: "off"; "threshold" drops classes below `alpha` times the second largest prior (appendix B.3); "binary"
            also makes the remaining ones equal (section 4.5). A second largest prior of 1e-6 or less drops nothing.
        alpha: threshold of the rectification, 0..1.
        pseudo_count: rows that pl adds; 0 is the paper's form.
        label_weight: rows that a true label counts for; 0, the paper's form, learns nothing from labels.

    Reference: Xu, Huang: "A Joint Training-Calibration Framework for Test-Time Personalization with Label Distribution
    Shift in Federated Learning", Federated Learning and Analytics in Practice workshop, ICML 2023.
    """

    name: ClassVar[str] = "fedcal"
    layout: ClassVar[int] = 1

    estimator: str = choice("pl", "em", "fm", doc="pl counts predictions; em maximises likelihood; fm matches features")
    window: int = integer(100, low=1, high=10_000, doc="rows that the prior is estimated from")
    apply: str = choice("current", "next", doc="current estimates with the batch itself; next only with earlier ones")
    rectify: str = choice("off", "threshold", "binary", doc="whether classes that look absent are dropped")
    alpha: float = real(0.5, low=0.0, high=1.0, doc="rectification drops priors below this times the second largest")
    pseudo_count: float = real(1.0, low=0.0, high=1e6, doc="rows, spread like the training prior, that pl adds")
    label_weight: float = real(0.0, low=0.0, high=1e3, doc="rows that a true label counts for; 0 ignores labels")

    def __post_init__(self) -> None:
        """Refuse hyper-parameters out of range."""
        check(self)

    @property
    def needs(self) -> frozenset[str]:
        """The prior, and prototypes and features to match them with by fm."""
        return frozenset({"prior", *(("classifier", "prototypes") if self.estimator == "fm" else ())})

    @property
    def learns(self) -> bool:
        """Whether true labels count."""
        return self.label_weight > 0

    def init(self, model: FrozenModel) -> State:
        """The state of a client that has sent nothing yet: an empty window.

        Raises:
            MissingSource: fm lacks prototypes.
        """
        kept = torch.zeros(self.window, self._width(model), dtype=_dtype(model))
        tensors = {self._kept: kept, "rows": torch.tensor(0)}
        if self.learns:
            tensors |= {"labels": torch.zeros(self.window, dtype=torch.int64), "labelled": torch.tensor(0)}
        return State(self.name, self.layout, model.content_hash, tensors=tensors)

    def form(self, model: FrozenModel, state: State) -> dict[str, Form]:
        """The window and, where they count, labels, each with how many came so far, as `Adapter.form`."""
        forms = {self._kept: Form((self.window, self._width(model)), (_dtype(model),)), "rows": count()}
        if self.learns:
            forms |= {"labels": count(self.window, high=model.classes - 1), "labelled": count()}
        return forms

    def cost(self, model: FrozenModel, rows: int) -> Cost:
        """Forward, and EM on all rows that are remembered, as `Costly.cost`."""
        sweeps = EM_STEPS if self.estimator == "em" else 1
        return forward_pass(rows).and_also(posterior_sweep(self.window).times(sweeps))

    def step(self, model: FrozenModel, state: State, x: Tensor) -> Step:
        """Answer the batch x [B, C, H, W]; raises InputError and StateMismatch as `Adapter.step`."""
        return self.on_frozen(model, state, model.frozen(model.batch(x)))

    def on_frozen(self, model: FrozenModel, state: State, frozen: Pass) -> Step:
        """Answer the batch of a frozen pass, as `FrozenOnly.on_frozen`."""
        return correct_frozen(self, model, state, frozen)

    def learn(self, model: FrozenModel, state: State, rows: Labelled) -> State:
        """The state with more true labels, as `Learning.learn`; images are not looked at."""
        require_state(self, model, state)
        labels = class_labels(rows.labels, len(rows.labels), model.classes)
        after = Ring(state.tensors["labels"], state.tensors["labelled"]).push(labels.cpu())
        return replace(state, tensors={**state.tensors, "labels": after.buffer, "labelled": after.seen})

    def correct(self, model: FrozenModel, state: State, logits: Tensor, features: Tensor) -> Step:
        """Correct the logits [B, K] of one batch, as `PriorCorrection.correct`."""
        require_state(self, model, state)
        before = Ring(state.tensors[self._kept], state.tensors["rows"])
        log_p = log_posteriors(logits)
        after = before.push(features.to(log_p) if self.estimator == "fm" else log_p)
        new = state.next({**state.tensors, self._kept: after.buffer, "rows": after.seen})
        source = source_prior(model, log_p)
        rows = (after if self.apply == "current" else before).rows().to(log_p)
        if len(rows) == 0:
            return corrected(new, log_p, source, source, features, {"rows": 0.0})
        estimate = self._estimate(model, rows, source, self._known(state, source))
        prior = floored(rectify(estimate, self.rectify, self.alpha))
        return corrected(new, log_p, prior, source, features, {"rows": float(len(rows)), **estimate.signals})

    @property
    def _kept(self) -> str:
        return "features" if self.estimator == "fm" else "log_posteriors"

    def bounded(self, model: FrozenModel, before: State, after: State, rows: int, influence: float) -> State:
        """The window with no more rows of the batch than `influence` mean batches have, as `Bounding.bounded`."""
        most = math.ceil(influence * int(before.tensors["rows"]) / before.step)
        if rows <= most:
            return after
        latest = Ring(after.tensors[self._kept], after.tensors["rows"]).latest(min(rows, self.window))
        new = Ring(before.tensors[self._kept], before.tensors["rows"]).push(latest[:most])
        return replace(after, tensors={**after.tensors, self._kept: new.buffer, "rows": new.seen})

    def _width(self, model: FrozenModel) -> int:
        return len(model.derived(prototypes_of).columns) if self.estimator == "fm" else model.classes

    def _known(self, state: State, like: Tensor) -> Tensor | None:
        """Weighted counts [K] of the true labels; None where they are not to count."""
        if not self.learns:
            return None
        labels = Ring(state.tensors["labels"], state.tensors["labelled"]).rows()
        return self.label_weight * torch.bincount(labels, minlength=len(like)).to(like)

    def _estimate(self, model: FrozenModel, rows: Tensor, source: Tensor, known: Tensor | None) -> Estimate:
        match self.estimator:
            case "pl":
                return pseudo_labels(rows, source, self.pseudo_count, known)
            case "em":
                return maximum_likelihood(rows, source, known)
            case _:
                found = match_features(rows, model.derived(prototypes_of), source)
                return found if known is None else averaged(found, len(rows), known)


def _dtype(model: FrozenModel) -> torch.dtype:
    return torch.promote_types(model.dtype, torch.float32)


def pseudo_labels(log_p: Tensor, source: Tensor, pseudo_count: float, known: Tensor | None = None) -> Estimate:
    """Shares of the predicted classes among the rows log_p [n, K], n >= 1 (Eq. 6), and known counts [K] of others."""
    counts, rows = torch.bincount(log_p.argmax(dim=-1), minlength=len(source)).to(source), float(len(log_p))
    if known is not None:
        counts, rows = counts + known, rows + float(known.sum())
    smoothed = (counts + pseudo_count * source) / (rows + pseudo_count)
    return Estimate(counts / rows, smoothed, {})


def maximum_likelihood(log_p: Tensor, source: Tensor, known: Tensor | None = None) -> Estimate:
    """The prior that makes the rows log_p [n, K], n >= 1, and known counts [K] most likely (Eq. 8 and 9)."""
    maximum = maximise_likelihood(log_p, source, EM_STEPS, EM_TOLERANCE, known)
    return Estimate(maximum.prior, maximum.prior, maximum.signals(EM_TOLERANCE))


def match_features(features: Tensor, prototypes: Prototypes, source: Tensor) -> Estimate:
    """The prior whose mixture of prototypes is nearest to the mean of the features [n, d], n >= 1 (Eq. 10).

    Classes with a prototype of zeros keep their part of the training prior p_s [K]; the others share the rest.
    """
    measured = prototypes.measured
    prior = source.to("cpu", torch.float64, copy=True)
    if bool(measured.any()):
        mixture = nearest_mixture(prototypes.columns, features.mean(dim=0), prototypes.ridge)
        prior[measured] = prior[measured].sum() * mixture
    signals: dict[str, Signal] = {"condition": prototypes.condition, "absent_classes": float((~measured).sum())}
    return Estimate(prior.to(source), prior.to(source), signals)


def averaged(estimate: Estimate, rows: int, known: Tensor) -> Estimate:
    """An estimate from so many rows, averaged with known counts [K] of others."""
    raw, prior = ((rows * each + known) / (rows + known.sum()) for each in (estimate.raw, estimate.prior))
    return Estimate(raw, prior, estimate.signals)


def prototypes_of(model: FrozenModel) -> Prototypes:
    """The class prototypes of the source, made ready.

    Raises:
        MissingSource: there are none.
    """
    if model.source.prototypes is None:
        raise MissingSource("estimator 'fm' needs prototypes, which the model does not carry")
    return usable(model.source.prototypes)


def usable(prototypes: Tensor) -> Prototypes:
    """Prototypes [K, d] made ready; those of zeros are left out."""
    measured = (prototypes != 0).any(dim=1).cpu()
    columns = prototypes.cpu().double()[measured].T
    condition = condition_number(columns) if bool(measured.any()) else 1.0
    ridge = RIDGE * float(columns.square().sum(dim=0).mean()) if condition > LARGEST_CONDITION else 0.0
    return Prototypes(columns, measured, condition, ridge)


def rectify(estimate: Estimate, mode: str, alpha: float) -> Tensor:
    """The estimated prior [K] without the classes that look absent (section 4.5 and appendix B.3).

    Absent are classes whose raw prior is less than `alpha` times the second largest, so at least two always remain.
    """
    second = estimate.raw.topk(2).values[1]
    if mode == "off" or bool(second <= FLOOR):
        return estimate.prior
    kept = (estimate.raw >= alpha * second).to(estimate.prior)
    prior = kept if mode == "binary" else estimate.prior * kept
    return prior / prior.sum()
