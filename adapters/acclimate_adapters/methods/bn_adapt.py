"""BN-Adapt: BatchNorm statistics between those of training and those of the batch (Schneider et al., NeurIPS 2020)."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from acclimate_adapters.adapter import Step, require, require_state
from acclimate_adapters.functional import batch_statistics, entropy
from acclimate_adapters.hyperparameters import check, real
from acclimate_adapters.network.model import FrozenModel, require_finite
from acclimate_adapters.network.probes import Norm
from acclimate_adapters.state import Form, State


@dataclass(frozen=True, slots=True)
class BnAdapt:
    """Count the training statistics as N images and those of the batch as n, and normalise by the blend.

    Method (equations numbered here):
        N      `prior_strength`; n, the number of images in this batch
        p      = N / (N + n)                                            (1)
        mu     = p mu_s + (1 - p) mu_t                                  (2)
        sigma2 = p sigma2_s + (1 - p) sigma2_t                          (3)
        mu_s, sigma2_s are a layer's running statistics; mu_t and sigma2_t, unbiased, those of its input in this very
        pass, so deeper layers see activations that are adapted already. Nothing is carried from batch to batch.

    Departures:
        n is the real size of the batch; the program of the ATP authors uses the configured one for a short last batch.
        A layer that sees one value per channel, whose variance is undefined, keeps its running statistics.

    Args:
        prior_strength: N, in images, 0..1e9. 0 uses the batch alone; the larger, the closer to the frozen model.

    Reference: Schneider, Rusak, Eck, Bringmann, Brendel, Bethge: "Improving robustness against common corruptions by
    covariate shift adaptation", NeurIPS 2020.
    """

    name: ClassVar[str] = "bn_adapt"
    layout: ClassVar[int] = 1
    needs: ClassVar[frozenset[str]] = frozenset({"batch_norm"})

    prior_strength: float = real(16.0, low=0.0, high=1e9, doc="images that the training statistics count for")

    def __post_init__(self) -> None:
        """Refuse hyper-parameters out of range."""
        check(self)

    def init(self, model: FrozenModel) -> State:
        """The state of a client that has sent nothing yet; it only counts batches.

        Raises:
            MissingSource: the model has no BatchNorm layer that could be adapted.
        """
        require(self, model)
        return State(self.name, self.layout, model.content_hash)

    def form(self, model: FrozenModel, state: State) -> dict[str, Form]:
        """No tensors, as `Adapter.form`."""
        return {}

    def step(self, model: FrozenModel, state: State, x: Tensor) -> Step:
        """Answer the batch x [B, C, H, W]; raises InputError and StateMismatch as `Adapter.step`."""
        require_state(self, model, state)
        x = model.batch(x)
        rule = Blend(source_weight(self.prior_strength, len(x)))
        with torch.no_grad():
            answer = model.run(x, normalise=rule)
        logits = require_finite(answer.logits)
        signals = {
            "entropy": float(entropy(logits).mean()),
            "source_weight": rule.weight,
            "constant_channels": float(sum(rule.constant)),
            "undefined_variances": float(rule.undefined),
        }
        return Step(logits, state.next(), signals, features=answer.features)


def source_weight(prior_strength: float, n: int) -> float:
    """Weight p of the training statistics against those of n >= 1 images, in 0..1 (1)."""
    return prior_strength / (prior_strength + n)


class Blend:
    """Normalises by the blend of running and batch statistics (2) and (3), and notes what is odd about the batch.

    Attributes:
        constant: per layer, the number [] of channels whose values are all the same in this batch.
        undefined: layers that kept their running statistics, because they saw one value per channel.
    """

    def __init__(self, weight: float) -> None:
        self.weight = weight
        self.constant: list[Tensor] = []
        self.undefined = 0

    def __call__(self, norm: Norm, x: Tensor) -> Tensor:
        """Normalise x [B, C, ...]."""
        mean, variance = batch_statistics(x)
        if variance is None:
            self.undefined += 1
            return norm.by_statistics(x, norm.running_mean, norm.running_var)
        self.constant.append((variance == 0).sum())
        mean, variance = self._blend(mean, norm.running_mean), self._blend(variance, norm.running_var)
        return norm.by_statistics(x, mean, variance)

    def _blend(self, batch: Tensor, running: Tensor) -> Tensor:
        return torch.lerp(batch, running.to(batch), self.weight).to(running)
