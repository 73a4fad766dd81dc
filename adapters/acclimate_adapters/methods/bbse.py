"""BBSE: the class prior of one batch through the confusion matrix (Lipton et al., ICML 2018)."""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from acclimate_adapters.adapter import Step, require, require_state
from acclimate_adapters.functional import project_to_simplex
from acclimate_adapters.hyperparameters import check, choice
from acclimate_adapters.methods.priors import correct_frozen, corrected, log_posteriors, source_prior
from acclimate_adapters.methods.simplex import LARGEST_CONDITION, condition_number, nearest_mixture
from acclimate_adapters.network.model import FrozenModel, Pass
from acclimate_adapters.state import Form, State

SMOOTHING = 1e-3  # share of the uniform prior in the estimate


class Confusion(NamedTuple):
    """A confusion matrix made ready for estimation."""

    matrix: Tensor  # C [K, K], C[i, j] = P(predicted i | true j), double precision on the CPU, columns sum to 1
    absent: int  # classes that no measured row had
    condition: float  # condition number of C


@dataclass(frozen=True, slots=True)
class Bbse:
    """Correct the predictions for the class prior that, seen through the confusion matrix, explains the batch.

    Method:
        mu     mean prediction of the batch: mean posterior (`mode` soft) or shares of the predicted classes (hard)
        C      confusion matrix of the same mode, C[i, j] = P(predicted i | true j) (`Source.confusion`)
        q      with C q = mu, which holds where only the class shares changed
        q      = 0.999 q + 0.001 / K
        logits = log p_s(.|x_i) + log q - log p_s, normalised: Bayes with importance weights q / p_s

    Departures:
        C q = mu seldom has a solution on the simplex. `solver` simplex takes the q of the simplex that minimises
        |C q - mu|; pinv projects pinv(C) mu onto it, as the program of the ATP authors does, which magnifies noise
        more. That program leaves out the division by p_s, which is the same when p_s is uniform.
        A class without a measured row (a zero column) counts as always recognised; the signal "absent_classes" tells.
        Beyond a condition number of 1e3 the estimate would be noise: the answer keeps the training prior, and the
        signal "refused" is 1.

    Args:
        mode: "soft" or "hard".
        solver: "simplex" or "pinv".

    Reference: Lipton, Wang, Smola: "Detecting and Correcting for Label Shift with Black Box Predictors", ICML 2018.
    """

    name: ClassVar[str] = "bbse"
    layout: ClassVar[int] = 1
    needs: ClassVar[frozenset[str]] = frozenset({"confusion", "prior"})

    mode: str = choice("soft", "hard", doc="soft averages the posteriors; hard counts the predicted classes")
    solver: str = choice("simplex", "pinv", doc="simplex is constrained least squares; pinv inverts, then projects")

    def __post_init__(self) -> None:
        """Refuse hyper-parameters out of range."""
        check(self)

    def init(self, model: FrozenModel) -> State:
        """The state of a client that has sent nothing yet; it counts batches and holds no tensor.

        Raises:
            ConfigurationError: the model carries no confusion matrix for this mode.
        """
        require(self, model)
        model.source.confusion_matrix(self.mode)
        return State(self.name, self.layout, model.content_hash)

    def form(self, model: FrozenModel, state: State) -> dict[str, Form]:
        """No tensors, as `Adapter.form`."""
        return {}

    def step(self, model: FrozenModel, state: State, x: Tensor) -> Step:
        """Answer the batch x [B, C, H, W]; raises InputError and StateMismatch as `Adapter.step`."""
        return self.on_frozen(model, state, model.frozen(model.batch(x)))

    def on_frozen(self, model: FrozenModel, state: State, frozen: Pass) -> Step:
        """Answer the batch of a frozen pass, as `FrozenOnly.on_frozen`."""
        return correct_frozen(self, model, state, frozen)

    def correct(self, model: FrozenModel, state: State, logits: Tensor, features: Tensor) -> Step:
        """Correct the logits [B, K] of one batch, as `PriorCorrection.correct`."""
        require_state(self, model, state)
        log_p = log_posteriors(logits)
        source = source_prior(model, log_p)
        confusion = model.derived(measured_confusion, self.mode)
        refused = confusion.condition > LARGEST_CONDITION
        prior = source
        if not refused:
            prior = smooth(unmix(confusion.matrix, mean_prediction(log_p, self.mode), self.solver)).to(source)
        measured = {"condition": confusion.condition, "absent_classes": float(confusion.absent)}
        return corrected(state.next(), log_p, prior, source, features, {**measured, "refused": float(refused)})


def mean_prediction(log_p: Tensor, mode: str) -> Tensor:
    """mu [K] of log-posteriors [B, K], in double precision on the CPU."""
    if mode == "soft":
        return log_p.exp().mean(dim=0).cpu().double()
    return torch.bincount(log_p.argmax(dim=-1), minlength=log_p.shape[-1]).cpu().double() / len(log_p)


def measured_confusion(model: FrozenModel, mode: str) -> Confusion:
    """The source's confusion matrix of a mode, made ready."""
    return usable(model.source.confusion_matrix(mode))


def usable(confusion: Tensor) -> Confusion:
    """The matrix [K, K] with columns that sum to 1 exactly, and a one on the diagonal of columns of zeros."""
    matrix = confusion.cpu().double()
    absent = (matrix == 0).all(dim=0)
    matrix = torch.where(absent, torch.eye(len(matrix), dtype=matrix.dtype), matrix)
    matrix = matrix / matrix.sum(dim=0)
    return Confusion(matrix, int(absent.sum()), condition_number(matrix))


def unmix(confusion: Tensor, mu: Tensor, solver: str) -> Tensor:
    """The prior q [K] on the simplex with C q = mu, or nearly so; C [K, K] is invertible."""
    if solver == "pinv":
        return project_to_simplex(torch.linalg.pinv(confusion) @ mu)
    return nearest_mixture(confusion, mu)


def smooth(prior: Tensor) -> Tensor:
    """The prior [K] mixed with a little of the uniform one, so that no class is impossible."""
    return (1 - SMOOTHING) * prior + SMOOTHING / len(prior)
