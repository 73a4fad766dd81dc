"""`consensus`: what several methods say together, where one that looks otherwise disagrees with the frozen model."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from acclimate_adapters.adapter import Step, require, require_state
from acclimate_adapters.balanced.balanced import Balanced
from acclimate_adapters.balanced.moments import SourceMoments
from acclimate_adapters.balanced.passes import Blending, Passes, Rows, TorchPasses
from acclimate_adapters.cost import Cost, forward_pass, posterior_sweep
from acclimate_adapters.functional import Numbers, log_softmax, numbers
from acclimate_adapters.guard import bounded
from acclimate_adapters.methods.bn_adapt import BnAdapt
from acclimate_adapters.methods.chain import join, part_of
from acclimate_adapters.methods.em import Em
from acclimate_adapters.methods.t3a import T3a
from acclimate_adapters.network.model import FrozenModel, Pass
from acclimate_adapters.state import Form, State

PRIOR_STRENGTH: Final = 16.0
"""Rows that the training statistics count for in the pass of BN-Adapt."""
BALANCED, EM, T3A = Balanced(), Em(steps=2), T3a(filter_k=20)
REMEMBERING: Final = (BALANCED, T3A)
"""The members that carry something from batch to batch."""
LAYOUTS: Final = 1000
"""The layouts of these two, a and b, make the layout 1000 a + b."""


@dataclass(frozen=True, slots=True)
class Consensus:
    """Answer with the mean of five methods where T3A contradicts the frozen model, and with the frozen model elsewhere.

    This project's own method, not one of a paper. Nothing in it is fitted, so it has no hyper-parameters.

    Method (equations numbered here):
        P_m      class probabilities of a member m: softmax of its logits, of T3A's scores as they are. Members are
                 `none`, `bn_adapt` (`prior_strength` 16), `bn_adapt+em` (2 steps), `t3a` (`filter_k` 20), `balanced`,
                 each on every batch, with a state of its own
        mean     = (P_none + P_bn_adapt + P_bn_adapt+em + P_t3a + P_balanced) / 5                               (1)
        answer   of a row is P_none where T3A and the frozen model predict the same class, else the mean         (2)
        Four passes of the network: the frozen one, that of BN-Adapt, and two of `balanced`.

    Departures: none.

    Reference: docs/explanation-consensus.md.
    """

    name: ClassVar[str] = "consensus"
    layout: ClassVar[int] = LAYOUTS * BALANCED.layout + T3A.layout
    needs: ClassVar[frozenset[str]] = BALANCED.needs | T3A.needs | BnAdapt.needs
    uncorrectable: ClassVar[str] = "corrected for the client's class prior in part"

    def init(self, model: FrozenModel) -> State:
        """The state of a client that has sent nothing yet: those of `balanced` and `t3a`.

        Raises:
            MissingSource: the model has no BatchNorm or no linear classifier, or the source lacks class moments.
            ConfigurationError: they are of another width than the layer.
        """
        require(self, model)
        tensors = join(member.init(model) for member in REMEMBERING)
        return State(self.name, self.layout, model.content_hash, tensors=tensors)

    def form(self, model: FrozenModel, state: State) -> dict[str, Form]:
        """Those of `balanced` and `t3a`, as `Adapter.form`."""
        return {
            f"{member.name}.{name}": form
            for member in REMEMBERING
            for name, form in member.form(model, part_of(state, member)).items()
        }

    def bounded(self, model: FrozenModel, before: State, after: State, rows: int, influence: float) -> State:
        """Each member bounded in its own way, as `Bounding.bounded`."""
        parts = [
            bounded(member, model, part_of(before, member), part_of(after, member), rows, influence)
            for member in REMEMBERING
        ]
        return replace(after, tensors=join(parts))

    def cost(self, model: FrozenModel, rows: int) -> Cost:
        """The frozen pass, that of BN-Adapt with EM, and those of `balanced`, as `Costly.cost`."""
        passes = forward_pass(rows).times(2)
        return passes.and_also(posterior_sweep(rows).times(EM.steps), BALANCED.cost(model, rows))

    def step(self, model: FrozenModel, state: State, x: Tensor) -> Step:
        """Answer the batch x [B, C, H, W]; raises InputError and StateMismatch as `Adapter.step`."""
        return self.step_many(model, [state], [x])[0]

    def step_many(
        self, model: FrozenModel, states: Sequence[State], batches: Sequence[Tensor], passes: Passes | None = None
    ) -> list[Step]:
        """The steps of several clients, whose rows go through the network together; as `Balanced.step_many`."""
        for state in states:
            require_state(self, model, state)
        source, batches = model.derived(SourceMoments.of), [model.batch(x) for x in batches]
        rows, sizes = Rows.of(batches, source.prior), [len(x) for x in batches]
        passes = passes or TorchPasses(model, source)
        run = passes(rows)
        frozen = model.frozen(rows.x)
        blended = run.blended(Blending.of(batches, PRIOR_STRENGTH, source.prior))
        balanced = BALANCED.step_many(model, [part_of(state, BALANCED) for state in states], batches, passes, run)
        of_clients = zip(torch.split(frozen.features, sizes), torch.split(frozen.logits, sizes), strict=True)
        return [
            _finish(model, state, Pass(*of_client), logits, step)
            for state, of_client, logits, step in zip(
                states, of_clients, torch.split(blended, sizes), balanced, strict=True
            )
        ]


def _finish(model: FrozenModel, state: State, frozen: Pass, blended: Tensor, balanced: Step) -> Step:
    """The answer to one client's batch.

    Args:
        model: the frozen model.
        state: the client's.
        frozen: the frozen pass over the batch.
        blended: [B, K], logits of BN-Adapt.
        balanced: the step of `balanced`.
    """
    templates = T3A.on_frozen(model, part_of(state, T3A), frozen)
    corrected = EM.correct(model, EM.init(model), blended, frozen.features).logits
    assert balanced.uncorrected is not None
    log_none, log_blended, log_corrected, log_templates, log_balanced, log_uncorrected = (
        log_softmax(numbers(logits))
        for logits in (frozen.logits, blended, corrected, templates.logits, balanced.logits, balanced.uncorrected)
    )
    agreed = log_templates.argmax(axis=1) == log_none.argmax(axis=1)
    always = log_none, log_blended, log_templates
    logits = consensus(log_none, agreed, *always, log_corrected, log_balanced)
    uncorrected = consensus(log_none, agreed, *always, log_blended, log_uncorrected)
    signals = {
        "entropy": -float((np.exp(logits) * logits).sum(axis=-1).mean()),
        "agreed": float(agreed.mean()),
        **{name: balanced.signals[name] for name in ("label_shift", "restarted")},
    }
    answer, before_prior = (torch.from_numpy(each).to(frozen.features) for each in (logits, uncorrected))
    new = state.next(join((balanced.state, templates.state)))
    return Step(answer, new, signals, frozen.logits, frozen.features, before_prior)


def consensus(log_frozen: Numbers, agreed: NDArray[np.bool_], *log_p: Numbers) -> Numbers:
    """Log-probabilities [B, K] of the answer, (1) and (2).

    Args:
        log_frozen: [B, K], those of the frozen model.
        agreed: [B], whether T3A predicts the same class.
        log_p: [B, K], those of each member, the frozen model included.
    """
    mean = np.logaddexp.reduce(log_p, axis=0) - np.log(len(log_p))
    answer: Numbers = np.where(agreed[:, None], log_frozen, mean)
    return answer
