"""What `balanced` knows of a client, and the state that holds it."""

from collections.abc import Container, Mapping
from typing import Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from acclimate_adapters.balanced.moments import SourceMoments
from acclimate_adapters.functional import Numbers, numbers
from acclimate_adapters.state import LARGEST_COUNT, Form, State

HYPOTHESES: Final = ("h0", "h1")


class Hypothesis(NamedTuple):
    """What a client's rows looked like under one explanation of them."""

    posterior: Numbers  # [K], mean over the rows
    moments: Tensor  # [2, C], means over the rows of a and b at all layers, channels side by side

    def after(self, log_p: Numbers, moments: Tensor, weight: float) -> "Hypothesis":
        """With a batch folded in: its log-posteriors [B, K], the moments after it, its weight among all rows."""
        return Hypothesis(self.posterior_after(log_p, weight), moments)

    def posterior_after(self, log_p: Numbers, weight: float) -> Numbers:
        """The mean posterior [K] with a batch folded in."""
        mean: Numbers = np.exp(log_p).mean(axis=0)
        return self.posterior + weight * (mean - self.posterior)


class Client(NamedTuple):
    """What is known of a client."""

    rows: float  # n; fractional once rows are partly forgotten
    h0: Hypothesis
    h1: Hypothesis
    labelled: Numbers | None = None  # [K], counts of true labels; None where they are not to count

    @classmethod
    def fresh(cls, source: SourceMoments, *, learns: bool = False) -> "Client":
        """One that has sent nothing yet, and whose labels are to count or not."""
        zeros = np.zeros_like(source.shares)
        nothing = Hypothesis(zeros, source.overall)
        return cls(0.0, nothing, nothing, zeros if learns else None)

    def pack(self, source: SourceMoments) -> dict[str, Tensor]:
        """The tensors of a state, in the precision and on the device of the moments, which are told as deviations."""
        tensors = {"rows": torch.tensor(self.rows, dtype=torch.float64)}
        for name, (posterior, moments) in zip(HYPOTHESES, (self.h0, self.h1), strict=True):
            tensors |= {
                f"{name}.posterior": moments.new_tensor(posterior),
                deviations_of(name): source.deviations(moments),
            }
        if self.labelled is not None:
            tensors["labelled"] = self.h0.moments.new_tensor(self.labelled)
        return tensors

    @classmethod
    def forms(cls, source: SourceMoments, tensors: Container[str], *, learns: bool) -> dict[str, Form]:
        """The forms of the tensors that `pack` gives, or gave in earlier versions, if there are these."""
        classes = Form.of(source.prior, low=0)
        forms = {"rows": Form((), (torch.float64,), 0, LARGEST_COUNT)}
        for name in HYPOTHESES:
            kept = _moments_of(name) if _moments_of(name) in tensors else deviations_of(name)
            forms |= {f"{name}.posterior": classes, kept: Form.of(source.overall)}
        return forms | ({"labelled": classes} if learns else {})

    @classmethod
    def unpack(cls, state: State, source: SourceMoments) -> "Client":
        """The inverse of `pack`; moments on the device and in the precision of those of the source."""
        tensors = state.tensors
        h0, h1 = (Hypothesis(numbers(tensors[f"{h}.posterior"]), _moments(tensors, h, source)) for h in HYPOTHESES)
        labelled = tensors.get("labelled")
        return cls(float(tensors["rows"]), h0, h1, None if labelled is None else numbers(labelled))


def deviations_of(hypothesis: str) -> str:
    """The tensor of a state with how the client's moments deviate from those of the source under a hypothesis."""
    return f"{hypothesis}.deviations"


def _moments_of(hypothesis: str) -> str:
    """Where earlier versions kept the moments themselves."""
    return f"{hypothesis}.moments"


def _moments(tensors: Mapping[str, Tensor], hypothesis: str, source: SourceMoments) -> Tensor:
    earlier = tensors.get(_moments_of(hypothesis))
    if earlier is not None:
        return earlier.to(source.overall)
    return source.moments(tensors[deviations_of(hypothesis)].to(source.overall))
