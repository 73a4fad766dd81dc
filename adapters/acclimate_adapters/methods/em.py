"""EM: the class prior of one batch by expectation maximisation (Saerens et al., Neural Computation 2002)."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from acclimate_adapters.adapter import Step, require_state
from acclimate_adapters.cost import Cost, forward_pass, posterior_sweep
from acclimate_adapters.hyperparameters import check, integer, real
from acclimate_adapters.methods.priors import (
    FLOOR,
    correct_frozen,
    corrected,
    floored,
    log_posteriors,
    maximise_likelihood,
    source_prior,
)
from acclimate_adapters.network.model import FrozenModel, Pass
from acclimate_adapters.state import Form, State

CONVERGED = 1e-4  # L1 change of the prior by the last step


@dataclass(frozen=True, slots=True)
class Em:
    """Correct the predictions for the class prior that makes this batch most likely.

    Method:
        p_s    training prior (`Source.prior`);  q  prior of the batch, q = p_s at first
        E-step r_i = p_s(.|x_i) q / p_s, rows normalised: the posteriors, if q were the prior
        M-step q = mean of r_i over the rows of the batch
        logits = log p_s(.|x_i) + log q - log p_s, normalised: Bayes' rule with the prior q, after `steps` steps

    Departures:
        A fixed number of steps rather than convergence, like the program of the ATP authors: on a batch of 20 rows two
        steps regularise, while the maximum of the likelihood leaves hardly more than one class. The signal "converged"
        says whether the last step changed q by less than 1e-4 (L1); nothing is raised when it did not.
        That program leaves out the division by p_s, which is the same when p_s is uniform.
        No class falls below `floor`.

    Args:
        steps: EM steps per batch.
        floor: smallest prior of a class.

    Reference: Saerens, Latinne, Decaestecker: "Adjusting the Outputs of a Classifier to New a Priori Probabilities: A
    Simple Procedure", Neural Computation 14(1), 2002.
    """

    name: ClassVar[str] = "em"
    layout: ClassVar[int] = 1
    needs: ClassVar[frozenset[str]] = frozenset({"prior"})

    steps: int = integer(2, low=1, high=1000, doc="EM steps per batch; few regularise")
    floor: float = real(FLOOR, low=1e-12, high=1e-2, doc="smallest prior of a class")

    def __post_init__(self) -> None:
        """Refuse hyper-parameters out of range."""
        check(self)

    def init(self, model: FrozenModel) -> State:
        """The state of a client that has sent nothing yet; it counts batches and holds no tensor."""
        return State(self.name, self.layout, model.content_hash)

    def form(self, model: FrozenModel, state: State) -> dict[str, Form]:
        """No tensors, as `Adapter.form`."""
        return {}

    def cost(self, model: FrozenModel, rows: int) -> Cost:
        """Forward, and the steps of EM, as `Costly.cost`."""
        return forward_pass(rows).and_also(posterior_sweep(rows).times(self.steps))

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
        maximum = maximise_likelihood(log_p, source, self.steps)
        prior = floored(maximum.prior, self.floor)
        return corrected(state.next(), log_p, prior, source, features, maximum.signals(CONVERGED))
