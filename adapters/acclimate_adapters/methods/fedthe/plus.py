"""FedTHE+: the ensemble of FedTHE, then fine-tuning of the whole network on each sample (Jiang and Lin, ICLR 2023)."""

from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from acclimate_adapters.adapter import Step, complete, require_state
from acclimate_adapters.cost import Cost, forward_pass, gradient_pass, posterior_sweep
from acclimate_adapters.functional import at_least_float32, keyed_generator
from acclimate_adapters.hyperparameters import check, integer, real
from acclimate_adapters.methods.fedthe.enrolment import enrol, enrolled_forms, enrolment_cost
from acclimate_adapters.methods.fedthe.ensemble import Settings, answer_unenrolled, mix_heads, mixture_signals
from acclimate_adapters.methods.memo import marginal_entropy
from acclimate_adapters.methods.views import views
from acclimate_adapters.network.model import FrozenModel, Pass, require_finite
from acclimate_adapters.state import Form, State


@dataclass(frozen=True, slots=True)
class FedThePlus:
    """Mix the two heads as FedTHE does, then fine-tune extractor and heads on views of each sample, and forget that.

    Method:
        e*, h^history as `FedThe`                                                     (Algorithm 2 lines 1 to 8)
        p(v)   = softmax(e* z^g(v) + (1 - e*) z^l(v)) of the view v
        L_MEMO = entropy of the mean of p over `views` random views of the sample, new ones in each step  (MEMO)
        w^e, w^g, w^l <- minus `tuning_lr` * gradient of L_MEMO, `tuning_steps` times, e* fixed     (lines 9, 10)
        logits = e* z^g + (1 - e*) z^l of the sample itself under the tuned weights                    (line 11)
        Each sample starts from the model and the head of the enrolment again; nothing is written back.

    Departures:
        Those of `FedThe`: unenrolled clients, history, bias, start of the personal head.
        BatchNorm layers, which the paper's networks have not, keep their running statistics; their weights are tuned.
        The views are random crops with mirroring, which fit grey and small images; MEMO uses AugMix on larger ones.

    Args:
        alpha, beta, steps, lr, seed: as in `FedThe`; `seed` also draws the views.
        views: number of views of a sample.
        tuning_steps, tuning_lr: of the fine-tuning by plain SGD.

    Reference: Jiang, Lin: "Test-Time Robust Personalization for Federated Learning", ICLR 2023; Zhang, Levine, Finn:
        "MEMO: Test Time Robustness via Adaptation and Augmentation", NeurIPS 2022.
    """

    name: ClassVar[str] = "fedthe_plus"
    layout: ClassVar[int] = 1
    needs: ClassVar[frozenset[str]] = frozenset({"classifier", "descriptor", "gradients"})
    enrols: ClassVar[bool] = True

    alpha: float = real(0.1, low=0.0, high=1.0, doc="share of a new feature in the history")
    beta: float = real(0.3, low=0.0, high=1.0, doc="share of the sample's own feature in the smoothed one")
    steps: int = integer(20, low=0, high=1000, doc="steps of the optimisation of the head weight")
    lr: float = real(0.1, low=0.0, high=10.0, doc="step size of the optimisation of the head weight")
    views: int = integer(16, low=1, high=256, doc="random views of each sample")
    tuning_steps: int = integer(3, low=0, high=100, doc="steps of the fine-tuning on each sample")
    tuning_lr: float = real(5e-4, low=0.0, high=1.0, doc="step size of the fine-tuning")
    seed: int = integer(0, low=0, high=2**31 - 1, doc="views, and order of the examples of an enrolment")

    def __post_init__(self) -> None:
        """Refuse hyper-parameters out of range."""
        check(self)

    def init(self, model: FrozenModel, **enrolment: Tensor) -> State:
        """The state of a client that has sent nothing yet; arguments and errors as `FedThe.init`."""
        return State(self.name, self.layout, model.content_hash, tensors=enrol(model, self.seed, enrolment))

    def form(self, model: FrozenModel, state: State) -> dict[str, Form]:
        """Head, descriptor and history, if the client has enrolled, as `Adapter.form`."""
        return enrolled_forms(model, state)

    def cost(self, model: FrozenModel, rows: int) -> Cost:
        """Of a client that has enrolled: steps on views of each sample and a pass of its own, as `Costly.cost`."""
        each = gradient_pass(self.views).times(self.tuning_steps).and_also(forward_pass(1))
        return forward_pass(rows).and_also(posterior_sweep(rows).times(self.steps), each.times(rows))

    def lesson_cost(self, model: FrozenModel, rows: int) -> Cost:
        """Of an enrolment, as `CostlyToTeach.lesson_cost`."""
        return enrolment_cost(rows)

    def step(self, model: FrozenModel, state: State, x: Tensor) -> Step:
        """Answer the batch x [B, C, H, W]; raises InputError and StateMismatch as `Adapter.step`."""
        return complete(self.slices(model, state, x))

    def slices(self, model: FrozenModel, state: State, x: Tensor) -> Generator[None, None, Step]:
        """The step with a pause after each gradient, as `Sliced.slices`."""
        require_state(self, model, state)
        x = model.batch(x)
        frozen = model.frozen(x)
        if not state.tensors:
            return answer_unenrolled(frozen, state)
        mixture, new = mix_heads(model, state, frozen, Settings(self.alpha, self.beta, self.steps, self.lr))
        first = int(state.tensors["samples"])
        answers = []
        for row, (image, e) in enumerate(zip(x, mixture.weight.tolist(), strict=True)):
            # numbered over the whole stream: a sample gets the same views however the stream is cut into batches
            generator = keyed_generator(self.seed, first + row)
            answers.append((yield from self._answer(model, image, new["personal_head"], e, generator)))
        logits = require_finite(torch.cat([answer.logits for answer in answers]))
        features = torch.cat([answer.features for answer in answers])
        return Step(logits, state.next(new), mixture_signals(logits, mixture), frozen.logits, features)

    def _answer(
        self, model: FrozenModel, image: Tensor, head: Tensor, e: float, generator: torch.Generator
    ) -> Generator[None, None, Pass]:
        """Features [1, d] and mixed logits [1, K] of one image [C, H, W] after fine-tuning on it."""
        weights = {name: at_least_float32(model.tensor(name)) for name in model.parameters}
        with torch.inference_mode(False):
            image, head = image.clone(), head.clone()  # autograd refuses tensors made in inference mode
        for _ in range(self.tuning_steps):
            with torch.inference_mode(False):
                weights, head = tune(model, views(image, self.views, generator), weights, head, e, self.tuning_lr)
            yield
        with torch.inference_mode(False):
            return mix_pass(model.adapted(image.unsqueeze(0), weights), head, e)


def tune(
    model: FrozenModel, images: Tensor, weights: Mapping[str, Tensor], head: Tensor, e: float, lr: float
) -> tuple[dict[str, Tensor], Tensor]:
    """One step of gradient descent on the marginal entropy of one image (Algorithm 2, line 10).

    Args:
        model: the frozen model.
        images: [A, C, H, W], views of the image.
        weights: the model's parameters as tuned so far, by name.
        head: [K, d], the personal head as tuned so far.
        e: weight of the global head, fixed.
        lr: step size.

    Returns:
        Weights and head after the step.
    """
    with torch.enable_grad():
        *tensors, leaf = leaves = [tensor.detach().requires_grad_() for tensor in (*weights.values(), head)]
        prediction = mix_pass(model.run(images, dict(zip(weights, tensors, strict=True))), leaf, e)
        gradients = torch.autograd.grad(marginal_entropy(prediction), leaves, materialize_grads=True)
    *tuned, head = [torch.sub(t.detach(), g, alpha=lr) for t, g in zip(leaves, gradients, strict=True)]
    return dict(zip(weights, tuned, strict=True)), head


def mix_pass(answer: Pass, head: Tensor, e: float) -> Pass:
    """A pass of the network with the mixed logits of both heads; gradients flow."""
    personal, shared = at_least_float32(answer.features) @ head.T, at_least_float32(answer.logits)
    return Pass(answer.features, torch.lerp(personal, shared, e).to(answer.logits.dtype))
