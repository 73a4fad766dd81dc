"""What `balanced` knows of a client, and the state that holds it."""

from typing import NamedTuple

import torch
from torch import Tensor

from acclimate_adapters.moments import SourceMoments
from acclimate_adapters.state import State


class Hypothesis(NamedTuple):
    """What a client's rows looked like under one explanation of them."""

    posterior: Tensor  # [K], mean over the rows
    moments: Tensor  # [2, C], means over the rows of a and b at all layers, channels side by side

    def after(self, log_p: Tensor, moments: Tensor, weight: float) -> "Hypothesis":
        """With a batch folded in: its log-posteriors [B, K], the moments after it, its weight among all rows."""
        return Hypothesis(torch.lerp(self.posterior, log_p.exp().mean(0), weight), moments)


class Client(NamedTuple):
    """What is known of a client."""

    rows: float  # n; fractional once rows are partly forgotten
    h0: Hypothesis
    h1: Hypothesis
    labelled: Tensor | None = None  # [K], counts of true labels; None where they are not to count

    @classmethod
    def fresh(cls, source: SourceMoments, *, learns: bool = False) -> "Client":
        """One that has sent nothing yet, and whose labels are to count or not."""
        nothing = Hypothesis(torch.zeros_like(source.prior), torch.zeros_like(source.overall))
        return cls(0.0, nothing, nothing, torch.zeros_like(source.prior) if learns else None)

    def pack(self) -> dict[str, Tensor]:
        """The tensors of a state."""
        tensors = {"rows": torch.tensor(self.rows, dtype=torch.float64)}
        for name, hypothesis in {"h0": self.h0, "h1": self.h1}.items():
            tensors |= {f"{name}.{field}": tensor for field, tensor in hypothesis._asdict().items()}
        return tensors if self.labelled is None else {**tensors, "labelled": self.labelled}

    @classmethod
    def unpack(cls, state: State, like: Tensor) -> "Client":
        """The inverse of `pack`, on the device and in the precision of another tensor."""
        h0, h1 = (
            Hypothesis(*(state.tensors[f"{name}.{field}"].to(like) for field in Hypothesis._fields))
            for name in ("h0", "h1")
        )
        labelled = state.tensors.get("labelled")
        return cls(float(state.tensors["rows"]), h0, h1, None if labelled is None else labelled.to(like))
