"""MEMO: one prediction for all augmented views of an image (Zhang, Levine and Finn, NeurIPS 2022)."""

import math
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from acclimate_adapters.adapter import Step, complete, require_state
from acclimate_adapters.cost import Cost, forward_pass, gradient_pass
from acclimate_adapters.functional import at_least_float32, entropy, keyed_generator
from acclimate_adapters.hyperparameters import check, integer, real
from acclimate_adapters.methods.views import views
from acclimate_adapters.network.gradient import gradient
from acclimate_adapters.network.model import FrozenModel, Pass, require_finite
from acclimate_adapters.state import Form, State


@dataclass(frozen=True, slots=True)
class Memo:
    """Adapt all parameters to each image alone, so that its augmented views agree on a confident answer.

    Method (equations numbered here):
        a_1..a_A random views of the image x, A = `views`: crops of the padded image, half of them mirrored
        p_bar  = (p(a_1(x)) + ... + p(a_A(x))) / A, the marginal prediction                            (1)
        L      = H(p_bar), its entropy                                                                 (2)
        w      = w_G, then `steps` times w <- w - lr dL/dw, on the same views                          (3)
        logits = f(x; w), on the image itself, after the update; then w is w_G again
        BatchNorm layers stay in evaluation mode. N images are N adaptations: an answer depends on no other image.

    Departures:
        The authors augment with AugMix; like the program of the ATP authors this takes random crops of the image
        padded by 4 and horizontal flips. The padding repeats the edge (see `views`) instead of being black.
        The step is plain SGD, new for every image: a momentum would carry from one image to the next.

    Args:
        views: A, 1..64.
        lr: step size, 0..100. At 0 the answer is that of the frozen model.
        steps: 1..10.
        seed: of the views, 0..2^31 - 1. They follow from the seed, the number of the batch and the row in it.

    Reference: Zhang, Levine, Finn: "MEMO: Test time robustness via adaptation and augmentation", NeurIPS 2022.
    """

    name: ClassVar[str] = "memo"
    layout: ClassVar[int] = 1
    needs: ClassVar[frozenset[str]] = frozenset({"gradients"})

    views: int = integer(16, low=1, high=64, doc="augmented views of each image")
    lr: float = real(1e-3, low=0.0, high=100.0, doc="step size")
    steps: int = integer(1, low=1, high=10, doc="gradient steps for each image")
    seed: int = integer(0, low=0, high=2**31 - 1, doc="seed of the views")

    def __post_init__(self) -> None:
        """Refuse hyper-parameters out of range."""
        check(self)

    def init(self, model: FrozenModel) -> State:
        """The state of a client that has sent nothing yet; it only counts batches."""
        return State(self.name, self.layout, model.content_hash)

    def form(self, model: FrozenModel, state: State) -> dict[str, Form]:
        """No tensors, as `Adapter.form`."""
        return {}

    def cost(self, model: FrozenModel, rows: int) -> Cost:
        """For each image, steps on its views and a pass of its own, as `Costly.cost`."""
        each = gradient_pass(self.views).times(self.steps).and_also(forward_pass(1))
        return forward_pass(rows).and_also(each.times(rows))

    def step(self, model: FrozenModel, state: State, x: Tensor) -> Step:
        """Answer the batch x [B, C, H, W]; raises InputError and StateMismatch as `Adapter.step`."""
        return complete(self.slices(model, state, x))

    def slices(self, model: FrozenModel, state: State, x: Tensor) -> Generator[None, None, Step]:
        """The step with a pause after each gradient, as `Sliced.slices`."""
        require_state(self, model, state)
        x = model.batch(x)
        frozen = model.frozen(x)
        answers = []
        for row, image in enumerate(x):
            augmented = views(image, self.views, keyed_generator(self.seed, state.step, row))
            weights = yield from fine_tune(model, augmented, self.lr, self.steps)
            answers.append(model.adapted(image[None], weights))
        logits = require_finite(torch.cat([answer.logits for answer in answers]))
        features = torch.cat([answer.features for answer in answers])
        signals = {
            "entropy": float(entropy(logits).mean()),
            "frozen_entropy": float(entropy(frozen.logits).mean()),
        }
        return Step(logits, state.next(), signals, frozen.logits, features)


def fine_tune(
    model: FrozenModel, augmented: Tensor, lr: float, steps: int
) -> Generator[None, None, Mapping[str, Tensor]]:
    """All parameters after some steps from the global weights on the views [A, C, H, W] of one image (3)."""
    weights: Mapping[str, Tensor] = {name: at_least_float32(model.tensor(name)) for name in model.parameters}
    for _ in range(steps):
        g, _ = gradient(model, augmented, weights, marginal_entropy)
        weights = {name: torch.sub(weight, g[name], alpha=lr) for name, weight in weights.items()}
        yield
    return weights


def marginal_entropy(answer: Pass) -> Tensor:
    """Entropy [] of the mean prediction of a pass over the views of one image, (1) and (2), in nats.

    Stays in logarithms, so a class that no view believes in costs no precision.
    """
    log_p = torch.log_softmax(at_least_float32(answer.logits), dim=-1)
    return entropy(torch.logsumexp(log_p, dim=0) - math.log(len(log_p)))
