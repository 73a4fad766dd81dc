"""Label shift: the prior of a client's classes, and posteriors corrected for it. Shared by EM, BBSE and FedCal."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from acclimate_adapters.adapter import Adapter, Signal, Step
from acclimate_adapters.functional import at_least_float32, entropy, numbers
from acclimate_adapters.network.model import FrozenModel, Pass, require_finite
from acclimate_adapters.state import State

TINY = 1e-300  # keeps a row that no class explains from being 0 / 0
FLOOR = 1e-6  # smallest prior of a class: a class that was not seen yet stays possible


@runtime_checkable
class PriorCorrection(Adapter, Protocol):
    """An adapter that changes nothing but the class prior, so that it can follow one that changes the weights."""

    def correct(self, model: FrozenModel, state: State, logits: Tensor, features: Tensor) -> Step:
        """Correct what some weights answered to one batch, and fold the batch into the state.

        Args:
            model: the frozen model.
            state: the client's state.
            logits: [B, K], not corrected for any prior.
            features: [B, d], the classifier's input in the pass that gave the logits.

        Raises:
            StateMismatch: as `Adapter.step`.
            NumericalError: a logit is not finite.
        """
        ...


class Maximum(NamedTuple):
    """Where expectation maximisation arrived."""

    prior: Tensor  # [K]
    steps: int  # taken
    change: float  # L1 distance that the last step moved the prior
    gain: float  # mean log-likelihood of a row under this prior minus that under the training prior, in nats

    def signals(self, tolerance: float) -> dict[str, Signal]:
        """What there is to report; converged means that the last step changed less than the tolerance."""
        converged = float(self.change < tolerance)
        return {"converged": converged, "iterations": float(self.steps), "likelihood_gain": self.gain}


def correct_frozen(adapter: PriorCorrection, model: FrozenModel, state: State, frozen: Pass) -> Step:
    """`correct` on what the frozen model answers to a batch: the `on_frozen` of a prior correction."""
    step = adapter.correct(model, state, frozen.logits, frozen.features)
    return replace(step, frozen_logits=frozen.logits, uncorrected=frozen.logits)


def log_posteriors(logits: Tensor) -> Tensor:
    """Log-probabilities [B, K] of finite logits, in single precision at least.

    Raises:
        NumericalError: a logit is not finite.
    """
    return torch.log_softmax(at_least_float32(require_finite(logits)), dim=-1)


def source_prior(model: FrozenModel, like: Tensor) -> Tensor:
    """The training prior p_s [K], sum 1, in the precision and on the device of another tensor."""
    prior = model.source.prior.cpu().double()
    return (prior / prior.sum()).to(like)


def floored(prior: Tensor, floor: float = FLOOR) -> Tensor:
    """The prior [K] with every class at `floor` or more and sum 1; unchanged where no class lies below.

    With so many classes that the floors would fill more than half of the prior, the floor is 1 / (2 K).
    """
    floor = min(floor, 0.5 / len(prior))
    above = prior.clamp_min(floor) - floor
    return floor + above * ((1 - len(prior) * floor) / above.sum())


def maximise_likelihood(
    log_p: Tensor, source: Tensor, steps: int, tolerance: float = 0.0, known: Tensor | None = None
) -> Maximum:
    """Maximum-likelihood prior by EM (Saerens et al. 2002; FedCal, Eq. 8 and 9).

    E-step  r_i = p_s(.|x_i) q / p_s, rows normalised    (Eq. 8 with its general form's division by p_s)
    M-step  q = mean of r_i over i                       (Eq. 9)

    Starts from q = p_s. Never raises when it has not converged: `change` tells. Up to a hundred steps over few numbers
    each cost their calls alone, so they are taken in NumPy, in double precision on the CPU.

    Args:
        log_p: [n, K], log-posteriors under the training prior, n >= 1.
        source: p_s [K], positive.
        steps: most steps taken, >= 1.
        tolerance: stops after a step that changed q by less than this in L1.
        known: [K], weighted counts of labelled rows, which the M-step adds; see `labels`.
    """
    q = numbers(source)
    log_likelihood = numbers(log_p) - np.log(q)  # [n, K], log p(x_i|k) up to a row constant
    most = log_likelihood.max(axis=1)
    likelihood = np.exp(log_likelihood - most[:, None]) + TINY
    labelled = 0.0 if known is None else numbers(known)
    total = len(likelihood) + float(np.sum(labelled))
    columns, labelled = likelihood.T / total, labelled / total
    ones, change, taken = np.ones_like(q), math.inf, 0
    while taken < steps and not change < tolerance:
        new = q * columns.dot(np.reciprocal(likelihood.dot(q))) + labelled  # as methods both take half the time of @
        q, change, taken = new, float(np.abs(new - q).dot(ones)), taken + 1
    gain = float((np.log(likelihood @ q) + most).mean())  # p_s itself gives 0: the posteriors sum to 1
    return Maximum(torch.from_numpy(q).to(source), taken, change, gain)


def corrected(
    state: State, log_p: Tensor, prior: Tensor, source: Tensor, features: Tensor, signals: Mapping[str, Signal]
) -> Step:
    """Answer with the posteriors under another prior: p_t(k|x) = p_s(k|x) p_t(k) / p_s(k), rows normalised.

    FedCal, Eq. 5; in log space. The answer has the precision of the features, that of the model.

    Args:
        state: the new state.
        log_p: [B, K], log-posteriors under the training prior.
        prior: p_t [K], positive.
        source: p_s [K], positive.
        features: [B, d].
        signals: what else was measured.
    """
    logits = torch.log_softmax(log_p + (prior.log() - source.log()), dim=-1)
    shared: dict[str, Signal] = {
        "entropy": float(entropy(logits).mean()),
        "prior": tuple(prior.tolist()),
        "shift": float((prior - source).abs().sum() / 2),
    }
    return Step(logits.to(features.dtype), state, {**shared, **signals}, features=features)
