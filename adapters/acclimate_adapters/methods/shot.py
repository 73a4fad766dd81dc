"""SHOT: information maximisation and pseudo-labels at a frozen classifier (Liang et al., ICML 2020)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from acclimate_adapters.adapter import Step, require, require_state
from acclimate_adapters.cost import Cost, gradient_pass
from acclimate_adapters.functional import at_least_float32, entropy
from acclimate_adapters.hyperparameters import check, choice, real
from acclimate_adapters.network.gradient import BatchStatistics, gradient
from acclimate_adapters.network.model import FrozenModel, Pass, require_finite
from acclimate_adapters.state import Form, State

Tensors = Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class Shot:
    """Take one step per batch towards confident, diverse predictions, with everything but the classifier.

    Method (equations numbered here):
        theta  all parameters but those of the classifier; carried from batch to batch
        L_ent  mean entropy of the predictions; L_div = sum_k q_k ln q_k, q their mean                 (1)
        labels nearest class centroid, see `refined_labels`; no gradient flows through them            (2) to (4)
        L      = L_ent + L_div + beta CE(labels)                                                       (5)
        theta  <- theta - lr dL/dtheta                                                                 (6)
        logits come from the pass that L was measured on: the answer is from *before* this batch's update, as in the
        program of the ATP authors. BatchNorm layers normalise by the batch (biased variance), and the gradient flows
        through its statistics; running statistics stay those of the global model.

    Departures:
        The paper trains for epochs with momentum and labels the whole target set once per epoch, in evaluation mode;
        here one plain SGD step per batch, and the labels come from the same pass as the loss.
        A batch of one takes no step (its diversity is meaningless) and is answered with the running statistics.
        `centroids` "refined" follows the authors' program; "soft" is the simpler rule of the ATP authors' program.

    Args:
        lr: step size, 0..100. At 0 the answer is that of batch normalisation, not that of the frozen model.
        beta: weight of the pseudo-labels, 0..10; 0 leaves them out.
        centroids: "refined" or "soft".

    Reference: Liang, Hu, Feng: "Do we really need to access the source data? Source hypothesis transfer for
    unsupervised domain adaptation", ICML 2020.
    """

    name: ClassVar[str] = "shot"
    layout: ClassVar[int] = 1
    needs: ClassVar[frozenset[str]] = frozenset({"classifier", "gradients"})

    lr: float = real(1e-3, low=0.0, high=100.0, doc="step size")
    beta: float = real(0.3, low=0.0, high=10.0, doc="weight of the pseudo-labels; 0 leaves them out")
    centroids: str = choice(
        "refined", "soft", doc="refined: cosine, two rounds, predicted classes only; soft: Euclidean, one round"
    )

    def __post_init__(self) -> None:
        """Refuse hyper-parameters out of range."""
        check(self)

    def init(self, model: FrozenModel) -> State:
        """The state of a client that has sent nothing yet: the global parameters, the classifier's left out."""
        require(self, model)
        tensors = {name: at_least_float32(model.tensor(name)) for name in extractor_parameters(model)}
        return State(self.name, self.layout, model.content_hash, tensors=tensors)

    def form(self, model: FrozenModel, state: State) -> dict[str, Form]:
        """All parameters but the classifier's, as `Adapter.form`."""
        return {name: Form.of(model.tensor(name), torch.float32) for name in extractor_parameters(model)}

    def cost(self, model: FrozenModel, rows: int) -> Cost:
        """Forward and backward, as `Costly.cost`."""
        return gradient_pass(rows)

    def moved(self, model: FrozenModel, state: State) -> dict[str, Tensor]:
        """The parameters against the global ones, as `Moving.moved`."""
        return {name: tensor.to(model.device) - model.tensor(name) for name, tensor in state.tensors.items()}

    def step(self, model: FrozenModel, state: State, x: Tensor) -> Step:
        """Answer the batch x [B, C, H, W]; raises InputError and StateMismatch as `Adapter.step`."""
        require_state(self, model, state)
        x = model.batch(x)
        theta = {name: at_least_float32(tensor).to(model.device) for name, tensor in state.tensors.items()}
        if len(x) == 1:
            answer, new = model.adapted(x, theta), theta
        else:
            g, answer = gradient(model, x, theta, self.loss, BatchStatistics())
            new = {name: torch.sub(theta[name], g[name], alpha=self.lr) for name in theta}
        logits = require_finite(answer.logits)
        signals = {"entropy": float(entropy(logits).mean()), "diversity": float(-negative_diversity(logits))}
        return Step(logits, state.next(new), signals, features=answer.features)

    def loss(self, answer: Pass) -> Tensor:
        """The objective [] of one batch (5)."""
        loss = entropy(answer.logits).mean() + negative_diversity(answer.logits)
        if self.beta == 0:
            return loss
        rule = refined_labels if self.centroids == "refined" else soft_labels
        labels = rule(answer.features.detach(), answer.logits.detach().softmax(dim=1))
        return loss + self.beta * F.cross_entropy(answer.logits, labels)


def extractor_parameters(model: FrozenModel) -> tuple[str, ...]:
    """Names of all parameters but those of the classifier."""
    head = f"{model.classifier}."
    return tuple(name for name in model.parameters if not name.startswith(head))


def negative_diversity(logits: Tensor) -> Tensor:
    """L_div [], the negative entropy of the mean prediction of a batch [B, K], in -ln K..0 (1)."""
    q = at_least_float32(logits).softmax(dim=1).mean(dim=0)
    return (q * torch.log(q + 1e-9)).sum()


def refined_labels(features: Tensor, p: Tensor) -> Tensor:
    """Pseudo-labels [B] by the authors' rules.

    Features get a 1 appended and unit length; a centroid is their mean, weighted by the predictions (2); each
    sample takes the class of the centroid at the largest cosine (3), among the classes that were predicted at all.
    Then once more, with the labels as weights (4).

    Args:
        features: [B, d].
        p: [B, K], predictions.
    """
    features, p = at_least_float32(features), at_least_float32(p)
    f = F.normalize(torch.cat([features, torch.ones_like(features[:, :1])], dim=1), dim=1)
    weights, labels = p, p.argmax(dim=1)
    for _ in range(2):
        centroids = weights.T @ f / (weights.sum(dim=0)[:, None] + 1e-8)
        absent = torch.bincount(labels, minlength=p.shape[1]) == 0
        labels = (f @ F.normalize(centroids, dim=1).T).masked_fill(absent, -torch.inf).argmax(dim=1)
        weights = F.one_hot(labels, p.shape[1]).to(f.dtype)
    return labels


def soft_labels(features: Tensor, p: Tensor) -> Tensor:
    """Pseudo-labels [B] by the rule of the ATP authors' program: Euclidean distance to weighted centroids (2), (3).

    Args:
        features: [B, d].
        p: [B, K], predictions.
    """
    features, p = at_least_float32(features), at_least_float32(p)
    weights = p / p.sum(dim=0).clamp_min(torch.finfo(p.dtype).tiny)
    exact = "donot_use_mm_for_euclid_dist"  # the fast way cancels digits where distances are close
    return torch.cdist(features, weights.T @ features, compute_mode=exact).argmin(dim=1)
