"""FedTHE: a test-time ensemble of the global and a personal head (Jiang and Lin, ICLR 2023)."""

from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity, one_hot

from acclimate_adapters.adapter import Signal, Step, require_state
from acclimate_adapters.cost import Cost, forward_pass, posterior_sweep
from acclimate_adapters.functional import Numbers, at_least_float32, class_labels, entropy, numbers
from acclimate_adapters.hyperparameters import check, choice, integer, real
from acclimate_adapters.labels import Labelled
from acclimate_adapters.methods.fedthe.enrolment import (
    Examples,
    enrol,
    enrolled,
    enrolled_forms,
    enrolment_cost,
    global_descriptor,
    train_head,
)
from acclimate_adapters.network.model import FrozenModel, Pass, require_finite
from acclimate_adapters.state import Form, State

FOLD_CHUNK = 64  # features folded into the history at once: the work grows with this times their number
ADAM_BETAS, ADAM_EPS = (0.9, 0.999), 1e-8


@dataclass(frozen=True, slots=True)
class FedThe:
    """Mix the global head with the client's personal head, with a weight found for each sample.

    Method:
        h_n    feature of sample n (`Pass.features`); z^g, z^l logits of the global and the personal head on it
        h'_n   = beta * h_n + (1 - beta) * h^history           (Algorithm 2 line 2), h^history of the samples before n
        L_EM   = entropy of softmax(e * z^g + (1 - e) * z^l)                                              (Eq. 3)
        L_FA   = e * |h'_n - h^g| + (1 - e) * |h'_n - h^l|                                                (Eq. 4)
        L_SLW  = s * L_EM + (1 - s) * L_FA, s = cosine of the two heads' probabilities, a constant        (Eq. 5)
        e      = softmax over two scalars from (1, 1); `steps` steps of Adam at rate `lr` on L_SLW (Algorithm 2 line 6)
        h^history <- alpha * h_n + (1 - alpha) * h^history, from h_1                           (Algorithm 2 line 8)
        logits = e * z^g + (1 - e) * z^l
        h^g is `Source.descriptor`; h^l and the personal head come from enrolment (see `init`).

    Departures:
        A client that has not enrolled is answered by the global head, and the signal "enrolled" is 0.
        The history folds every sample once, however the stream is cut into batches, and each sample is optimised for
        itself. The authors' program does neither; `history="official"` repeats its use of the history.
        The global head keeps its bias; the personal head has none, as in the authors' program.
        The personal head starts from 0, where the paper is silent: a convex problem needs no random start.
        The paper enrols once. With `examples`, labelled images that `learn` is told later enrol the client further: the
        head is trained again, from 0, on the last `examples` of all, whose features stay in the state.

    Args:
        alpha: 0..1, share of a new feature in the history.
        beta: 0..1, share of the sample's own feature in h'.
        steps, lr: of the optimisation of e.
        history: "paper" forms h' from the samples before n. "official" is the authors' program on batches: sample n
            is folded in before h' is formed, and the first sample of each later batch is never folded in.
        seed: order of the examples while a personal head is trained.
        examples: labelled images that are remembered, by their features; 0 learns nothing after the enrolment.

    Reference: Jiang, Lin: "Test-Time Robust Personalization for Federated Learning", ICLR 2023.
    """

    name: ClassVar[str] = "fedthe"
    layout: ClassVar[int] = 1
    needs: ClassVar[frozenset[str]] = frozenset({"classifier", "descriptor"})
    enrols: ClassVar[bool] = True

    alpha: float = real(0.1, low=0.0, high=1.0, doc="share of a new feature in the history")
    beta: float = real(0.3, low=0.0, high=1.0, doc="share of the sample's own feature in the smoothed one")
    steps: int = integer(20, low=0, high=1000, doc="steps of the optimisation of the head weight")
    lr: float = real(0.1, low=0.0, high=10.0, doc="step size of the optimisation of the head weight")
    history: str = choice("paper", "official", doc="paper uses earlier samples only; official is the authors' program")
    seed: int = integer(0, low=0, high=2**31 - 1, doc="order of the examples while a personal head is trained")
    examples: int = integer(0, low=0, high=10_000, doc="labelled images that are remembered; 0 learns no further ones")

    def __post_init__(self) -> None:
        """Refuse hyper-parameters out of range."""
        check(self)

    @property
    def learns(self) -> bool:
        """Whether labelled images that come later enrol the client further."""
        return self.examples > 0

    def init(self, model: FrozenModel, **enrolment: Tensor) -> State:
        """The state of a client that has sent nothing yet; not enrolled without `enrolment`.

        Args:
            model: the frozen model.
            enrolment: x [N, C, H, W], normalised, and labels [N] int64, on which the personal head is trained; or a
                personal_head [K, d] and a descriptor [d] that were trained elsewhere.

        Raises:
            MissingSource: the model carries no descriptor.
            InputError: the enrolment cannot be used.
        """
        state = State(self.name, self.layout, model.content_hash)
        if self.learns and enrolment.keys() == {"x", "labels"}:
            global_descriptor(model)
            return self.learn(model, state, Labelled(**enrolment))
        return replace(state, tensors=enrol(model, self.seed, enrolment))

    def learn(self, model: FrozenModel, state: State, rows: Labelled) -> State:
        """The state with more examples, as `Learning.learn`; labels without their images change nothing.

        A personal head that was trained elsewhere gives way to that of the examples.
        """
        require_state(self, model, state)
        if rows.x is None:
            return state
        features = at_least_float32(model.features(rows.x))
        labels = class_labels(rows.labels, len(features), model.classes).to(features.device)
        known = Examples.unpack(state.tensors, self.examples, model.feature_size, features).with_more(features, labels)
        examples = known.features.rows()
        targets = one_hot(known.labels.rows(), model.classes).to(features.dtype)
        new = {"personal_head": train_head(examples, targets, self.seed), "descriptor": examples.mean(0)}
        return replace(state, tensors={**enrolled(**new), **state.tensors, **new, **known.pack()})

    def form(self, model: FrozenModel, state: State) -> dict[str, Form]:
        """Head, descriptor and history, if the client has enrolled, and its examples, as `Adapter.form`."""
        return enrolled_forms(model, state, self.examples)

    def cost(self, model: FrozenModel, rows: int) -> Cost:
        """Forward, and the steps that weight the two heads, as `Costly.cost`."""
        return forward_pass(rows).and_also(posterior_sweep(rows).times(self.steps))

    def lesson_cost(self, model: FrozenModel, rows: int) -> Cost:
        """Of a head that is trained again on all examples that are remembered, as `CostlyToTeach.lesson_cost`."""
        return enrolment_cost(max(rows, self.examples))

    def step(self, model: FrozenModel, state: State, x: Tensor) -> Step:
        """Answer the batch x [B, C, H, W]; raises InputError and StateMismatch as `Adapter.step`."""
        return self.on_frozen(model, state, model.frozen(model.batch(x)))

    def on_frozen(self, model: FrozenModel, state: State, frozen: Pass) -> Step:
        """Answer the batch of a frozen pass, as `FrozenOnly.on_frozen`."""
        require_state(self, model, state)
        if not state.tensors:
            return answer_unenrolled(frozen, state)
        settings = Settings(self.alpha, self.beta, self.steps, self.lr)
        mixture, new = mix_heads(model, state, frozen, settings, causal=self.history == "paper")
        mixed = mix(mixture.weight, at_least_float32(frozen.logits), mixture.personal)
        logits = require_finite(mixed.to(frozen.logits.dtype))
        after = state.next({**state.tensors, **new})
        return Step(logits, after, mixture_signals(logits, mixture), frozen.logits, frozen.features)


class Settings(NamedTuple):
    """Hyper-parameters of the ensemble, as in `FedThe`."""

    alpha: float
    beta: float
    steps: int
    lr: float


class Mixture(NamedTuple):
    """How the two heads are mixed on a batch."""

    personal: Tensor  # [B, K], logits of the personal head
    weight: Tensor  # [B], e: weight of the global head
    similarity: Tensor  # [B], s: cosine similarity of the heads' probabilities
    alignment: Tensor  # [B], L_FA at e


def mix_heads(
    model: FrozenModel, state: State, frozen: Pass, settings: Settings, *, causal: bool = True
) -> tuple[Mixture, dict[str, Tensor]]:
    """Weight the two heads for every sample of a batch and fold it into the history (Algorithm 2, lines 1 to 8).

    Returns:
        The mixture, and the tensors of the next state.
    """
    features, global_logits = at_least_float32(frozen.features), at_least_float32(frozen.logits)
    head, local, history = (state.tensors[name].to(features) for name in ("personal_head", "descriptor", "history"))
    start = history if int(state.tensors["samples"]) else features[0]
    histories, history = fold_history(features, start, settings.alpha, causal=causal)
    smoothed = settings.beta * features + (1 - settings.beta) * histories
    to_global = torch.linalg.vector_norm(smoothed - global_descriptor(model).to(features), dim=-1)
    to_local = torch.linalg.vector_norm(smoothed - local, dim=-1)
    personal = features @ head.T
    similarity = cosine_similarity(global_logits.softmax(-1), personal.softmax(-1), dim=-1).clamp(0, 1)
    weight = head_weight(global_logits, personal, similarity, to_global - to_local, settings.steps, settings.lr)
    alignment = weight * to_global + (1 - weight) * to_local  # Eq. 4
    samples = state.tensors["samples"] + len(features)
    new = {"personal_head": head, "descriptor": local, "history": history, "samples": samples}
    return Mixture(personal, weight, similarity, alignment), new


def fold_history(features: Tensor, start: Tensor, alpha: float, *, causal: bool = True) -> tuple[Tensor, Tensor]:
    """Exponential moving average of the features, sample by sample (Algorithm 2, line 8).

    Args:
        features: [B, d].
        start: [d], history of the samples before; the feature of the first sample when there was none.
        alpha: 0..1, share of a new feature.
        causal: False for the authors' program on batches: see `FedThe.history`.

    Returns:
        [B, d], the history that each sample uses, and [d], the one after the batch.
    """
    folded = [start.unsqueeze(0)]
    for chunk in torch.split(features if causal else features[1:], FOLD_CHUNK):
        decay, weights = (torch.from_numpy(each).to(features) for each in fold_weights(len(chunk), alpha))
        folded.append(torch.addmm(torch.outer(decay, folded[-1][-1]), weights, chunk))
    histories = torch.cat(folded)
    return histories[:-1] if causal else histories, histories[-1].clone()


def fold_weights(n: int, alpha: float) -> tuple[Numbers, Numbers]:
    """What is left of the start [n] and of each feature [n, n] after each of n folds."""
    decays: Numbers = np.float64(1 - alpha) ** np.arange(n + 1)
    ages = np.arange(n)[:, None] - np.arange(n)
    return decays[1:], np.tril(alpha * decays[ages.clip(0)])


@np.errstate(over="ignore", invalid="ignore")  # what overflows ends as NaN in the answer, which is refused
def head_weight(
    global_logits: Tensor, personal_logits: Tensor, similarity: Tensor, gap: Tensor, steps: int, lr: float
) -> Tensor:
    """e [B]: weight of the global head that minimises L_SLW (Eq. 5), each sample for itself.

    The two scalars start equal and their gradients are opposite, so Adam keeps them at 1 + v and 1 - v: the number v
    stands for both, and e = sigmoid(2v). The gradient is written out, with p = softmax of the mixed logits z and
    d = z^g - z^l: dL_EM/de = -(mean of z d - mean of z times mean of d), means over p. All samples take their steps
    together; so few numbers cost their calls alone, so they are taken in NumPy, in double precision on the CPU.

    Args:
        global_logits, personal_logits: [B, K].
        similarity: [B], s in 0..1.
        gap: [B], |h' - h^g| - |h' - h^l| = dL_FA/de.
        steps, lr: of Adam.
    """
    z_g, z_l, s, aligning = (
        np.ascontiguousarray(numbers(t).T)  # [K, B], whose sums over classes are sums of rows
        for t in (global_logits, personal_logits, similarity, (1 - similarity) * gap)
    )
    d, ones = z_g - z_l, np.ones(len(z_g))
    v = first = second = np.zeros_like(s)
    for t in range(1, steps + 1):
        e = 0.5 + 0.5 * np.tanh(v)
        z = z_l + e * d
        z -= np.maximum.reduce(z)
        p = np.exp(z)
        p /= ones.dot(p)
        z -= ones.dot(p * z)
        slope = aligning - s * ones.dot(p * z * d)  # dL_SLW/de
        gradient = slope * e * (1 - e)  # of the first scalar: de/dv is twice that, for v moves both
        first = ADAM_BETAS[0] * first + (1 - ADAM_BETAS[0]) * gradient
        second = ADAM_BETAS[1] * second + (1 - ADAM_BETAS[1]) * gradient * gradient
        scale = np.sqrt(second / (1 - ADAM_BETAS[1] ** t)) + ADAM_EPS
        v = v - lr / (1 - ADAM_BETAS[0] ** t) * first / scale
    return torch.from_numpy(0.5 + 0.5 * np.tanh(v)).to(similarity)


def mix(weight: Tensor, global_logits: Tensor, personal_logits: Tensor) -> Tensor:
    """Logits [B, K] of the ensemble: e * z^g + (1 - e) * z^l, with the weight e [B]."""
    return torch.lerp(personal_logits, global_logits, weight.unsqueeze(-1))


def answer_unenrolled(frozen: Pass, state: State) -> Step:
    """The answer to a client without a personal head: the global head alone."""
    logits = require_finite(frozen.logits)
    signals = {"entropy": float(entropy(logits).mean()), "enrolled": 0.0}
    return Step(logits, state.next(), signals, logits, frozen.features)


def mixture_signals(logits: Tensor, mixture: Mixture) -> dict[str, Signal]:
    """What the ensemble measured; those with one entry per sample are tuples."""
    return {
        "entropy": float(entropy(logits).mean()),
        "alignment": float(mixture.alignment.mean()),
        "global_weight": tuple(mixture.weight.tolist()),
        "similarity": tuple(mixture.similarity.tolist()),
        "enrolled": 1.0,
    }
