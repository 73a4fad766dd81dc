"""How adapters do on labelled client streams, beside the frozen model on the same images."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from acclimate_adapters import Adapter, FrozenModel, State, create, enrols
from acclimate_adapters.errors import AcclimateError
from acclimate_learning.clients import Client
from acclimate_learning.errors import LearningError
from acclimate_store import InputSpec
from acclimate_store.manifest import HARM, Evidence

BATCH: Final = 20
"""Images of a batch, as in ATP's experiments."""
DRAWS: Final = 10_000
"""Bootstrap samples of an interval."""
Progress = Callable[[], None]


@dataclass(frozen=True, slots=True, eq=False)
class Predicted:
    """Classes of one client's images, in the order of the images.

    Args:
        labels: the true ones, [N].
        frozen: what the frozen model predicts, [N].
        adapted: what the adapter predicts, [N].
        by_arm: what each arm of a portfolio predicts, [N, A]; None of other adapters.
    """

    labels: NDArray[np.int64]
    frozen: NDArray[np.int64]
    adapted: NDArray[np.int64]
    by_arm: NDArray[np.int64] | None


@dataclass(frozen=True, slots=True, eq=False)
class Judgement:
    """What one adapter did for each client.

    Args:
        adapter: its name.
        options: its hyper-parameters.
        accuracy: of its answers, [clients], 0..1.
        frozen: of the frozen model on the same images, [clients].
        step_ms: time of a step, the median over batches.
        state_bytes: of a client's state after its last batch, the mean over clients, before it is stored.
        failures: clients for which a step failed; the frozen model's answers stand for theirs.
        predicted: of each client, in the order of its images.
    """

    adapter: str
    options: Mapping[str, Any]
    accuracy: NDArray[np.float64]
    frozen: NDArray[np.float64]
    step_ms: float
    state_bytes: float
    failures: int
    predicted: tuple[Predicted, ...]

    @property
    def gains(self) -> NDArray[np.float64]:
        """Gain over the frozen model of each client, -1..1."""
        return self.accuracy - self.frozen

    def evidence(self, of: str) -> Evidence:
        """The record of the gain over clients that a bundle keeps.

        Args:
            of: what the clients were, in words.
        """
        low, high = interval(self.gains)
        return Evidence(
            adapter=self.adapter,
            options=dict(self.options),
            gain=float(self.gains.mean()),
            low=low,
            high=high,
            worst=float(self.gains.min()),
            harmed=float((self.gains < -HARM - 1e-9).mean()),
            clients=len(self.gains),
            of=of,
        )


def judge(
    model: FrozenModel,
    spec: InputSpec,
    clients: Sequence[Client],
    adapter: str,
    options: Mapping[str, Any] | None = None,
    *,
    enrolment: Sequence[Client] | None = None,
    batch: int = BATCH,
    progress: Progress = lambda: None,
) -> Judgement:
    """Run an adapter over the streams of clients, each from the beginning.

    Args:
        model: the frozen model.
        spec: of its input.
        clients: with their labels, which the adapter does not see.
        adapter: name of an adapter or a chain.
        options: its hyper-parameters.
        enrolment: of each client, the labelled images by which it enrols first; None leaves that out.
        batch: images at a time.
        progress: called after each client.

    Raises:
        LearningError: there are no clients.
        ConfigurationError: the model cannot serve the adapter.
    """
    if not clients:
        raise LearningError("there are no clients to judge by")
    method = create(adapter, **(options or {}))
    results = []
    for number, client in enumerate(clients):
        start = method.init(model) if enrolment is None else _enrolled(method, model, spec, enrolment[number])
        results.append(_stream(method, model, start, spec, client, batch))
        progress()
    predicted, times, sizes, failed = zip(*results, strict=True)
    return Judgement(
        adapter=adapter,
        options=options or {},
        accuracy=np.array([(each.adapted == each.labels).mean() for each in predicted]),
        frozen=np.array([(each.frozen == each.labels).mean() for each in predicted]),
        step_ms=float(np.median(np.concatenate(times))) * 1e3,
        state_bytes=float(np.mean(sizes)),
        failures=sum(failed),
        predicted=predicted,
    )


def interval(values: NDArray[np.float64], seed: int = 0) -> tuple[float, float]:
    """95 % bootstrap interval of a mean over clients."""
    draw = np.random.default_rng(seed)
    means = draw.choice(values, (DRAWS, len(values))).mean(1)
    low, high = np.quantile(means, (0.025, 0.975))
    return round(float(low), 12), round(float(high), 12)  # what is 0 but for the last bits is not above 0


def _enrolled(method: Adapter, model: FrozenModel, spec: InputSpec, told: Client) -> State:
    """The state of a client that has enrolled by labelled images of its own."""
    if not enrols(method):
        raise LearningError(f"{method.name} takes no labelled images of a client")
    return method.init(model, x=spec.normalise(told.images).to(model.device), labels=torch.from_numpy(told.labels))


def _stream(
    method: Adapter, model: FrozenModel, state: State, spec: InputSpec, client: Client, size: int
) -> tuple[Predicted, list[float], int, bool]:
    """What is predicted, seconds of each step, bytes of the state, and whether a step failed."""
    x = spec.normalise(client.images).to(model.device)
    frozen = torch.cat([model.frozen(model.batch(part)).logits.argmax(1).cpu() for part in torch.split(x, size)])
    answers, arms, times, failed = [], list[torch.Tensor](), [], False
    for part in torch.split(x, size):
        start = time.perf_counter()
        try:
            step = method.step(model, state, part)
        except AcclimateError:  # such as logits that are not finite: the service answers by the frozen model then
            failed = True
            break
        times.append(time.perf_counter() - start)
        state = step.state
        answers.append(step.logits.argmax(1).cpu())
        arms += [] if step.by_arm is None else [step.by_arm.cpu()]
    answered = torch.cat(answers) if answers else frozen[:0]
    answered = torch.cat([answered, frozen[len(answered) :]])
    by_arm = torch.cat(arms) if arms else None
    if by_arm is not None:
        by_arm = torch.cat([by_arm, frozen[len(by_arm) :, None].expand(-1, by_arm.shape[1])])
    predicted = Predicted(
        labels=client.labels,
        frozen=frozen.numpy(),
        adapted=answered.numpy(),
        by_arm=None if by_arm is None else by_arm.numpy(),
    )
    size_of_state = sum(tensor.nbytes for tensor in state.tensors.values())
    return predicted, times or [float("nan")], size_of_state, failed
