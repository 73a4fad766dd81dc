"""Steps as the thread takes them that runs torch: several clients' batches in, their new states and answers out."""

import hashlib
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any, Final, NamedTuple, TypeAlias, cast

import numpy as np
import orjson
from numpy.typing import NDArray
from torch import Tensor

from acclimate_adapters import ConfigurationError, Step
from acclimate_adapters.adapter import Sliced
from acclimate_adapters.labels import Informed
from acclimate_adapters.merged import Work, attempt, guarded_slices, guarded_steps, in_torch, mergeable
from acclimate_adapters.movement import movement
from acclimate_service.compute.adapters import Configurations
from acclimate_service.compute.client_state import PICTURE_BYTES, ClientState
from acclimate_service.compute.costs import StepBudget
from acclimate_service.compute.process import one_thread
from acclimate_service.guard.arms import Shares
from acclimate_service.guard.evidence import ALPHA
from acclimate_service.guard.policy import EVERY, Decision, by_own
from acclimate_service.guard.record import Record, most_asked
from acclimate_service.metrics import Metrics
from acclimate_service.state import Batch, Point
from acclimate_store import Bundle

GUARD_SAID: Final = b',"guard":{"answering":'
GUARDED: Final = GUARD_SAID + b'"frozen"'
"""How an answer says which model it is of, and one that it is the frozen model's. Quotes in strings are escaped, so
these bytes are found nowhere else."""
_KEPT: Final = 256
"""Configurations of which it is remembered how their steps run."""
_PACED: Final = 1024
"""Configurations of which it is remembered how long their steps take."""
_LEARNED: Final = 0.1
"""Weight of the latest step in what is expected of the next."""
_ADAPTED: Final = Decision("adapted", "fleet_not_behind")
_SHOWN: Final = (
    "entropy",
    "frozen_entropy",
    "shift",
    "label_shift",
    "uncertainty_shift",
    "representation_shift",
    "learning_rate",
    "mean_rate",
    "alignment",
    "differing",
    "agreed",
)
"""Signals that the timeline shows."""
_BY_ROW: Final = ("global_weight",)
"""Those with a number for each image, of which it shows the mean."""
_BEFELL: Final = ("skipped", "fallback", "collapsed", "restarted")
"""Those that are shown as events, wherever they are not 0."""
_LONGEST_PRIOR: Final = 128
"""Most classes of a prior that the timeline shows."""
_MOVEMENT_EVERY: Final = 8
"""Batches between two measurements of how far the modules have moved, which reads the whole state."""


@dataclass(frozen=True, slots=True)
class StepParameters:
    """All that decides a step and its answer beside state and images.

    Args:
        probabilities, logits: whether the answer is to hold those of every image and class.
        request_id: by which the rows are remembered; empty if they are not.
        against: configurations whose clients are to be answered unadapted, for what reason; `EVERY` stands for those
            not named. A client's own evidence comes first.
        alpha: of the test of that evidence.
        shares: what labels of all clients say of the arms of portfolios, by configuration.
        ask_budget: share of the rows for whose labels the answer may ask; they have to be remembered.
    """

    probabilities: bool = False
    request_id: str = ""
    against: Mapping[str, Decision] = field(default_factory=dict)
    alpha: float = ALPHA
    logits: bool = False
    shares: Mapping[str, Shares] = field(default_factory=dict)
    ask_budget: float = 0.0

    def encode(self) -> bytes:
        """As it is kept in a journal."""
        against = {name: decision.because for name, decision in self.against.items()}
        # left out where not wanted: replicas of older versions read it too
        further = [self.logits, self.shares, self.ask_budget]
        while further and not further[-1]:
            further.pop()
        return orjson.dumps([self.probabilities, self.request_id, against, self.alpha, *further])

    @classmethod
    def decode(cls, data: bytes) -> "StepParameters":
        """What `encode` wrote."""
        probabilities, request_id, against, alpha, *further = orjson.loads(data)
        decisions = {name: Decision("frozen", because) for name, because in against.items()}
        return cls(probabilities, request_id, decisions, alpha, *further)


@dataclass(frozen=True, slots=True)
class ImageBatch(Batch):
    """A batch of images that this process was sent: what its parameters say is known without reading them."""

    known: StepParameters = field(default_factory=StepParameters, repr=False, compare=False)


def image_batch(images: NDArray[Any], parameters: StepParameters | None = None) -> ImageBatch:
    """A batch of images as a journal keeps it.

    Args:
        images: [B, C, H, W], uint8 or float32, before normalisation.
        parameters: what else decides the step; by default, what nobody asked for is left out.
    """
    content, known = np.ascontiguousarray(images), parameters or StepParameters()
    return ImageBatch(content.dtype.name, content.shape, content.data, known.encode(), known=known)


class Job(NamedTuple):
    """A client's state, the batch of images to be folded into it, and what else decides the step."""

    state: ClientState
    batch: Batch
    parameters: StepParameters


Done: TypeAlias = tuple[ClientState, bytes]


class Steps:
    """Takes guarded steps, says what the guard by labels makes of them, and learns how long they take.

    Args:
        bundle, configurations, metrics: of the service.
        budget: knows what steps were expected to take; others may use the machine, too.
        timeline: as in `Settings`.

    Attributes:
        influence: as in `Settings`.
    """

    def __init__(
        self,
        bundle: Bundle,
        configurations: Configurations,
        metrics: Metrics,
        budget: StepBudget,
        influence: float = 0.0,
        timeline: bool = False,
    ) -> None:
        self._bundle = bundle
        self._configurations = configurations
        self._metrics = metrics
        self._budget = budget
        self._pace: dict[str, float] = {}  # of each configuration, how many times what was expected its steps take
        self.influence = influence
        self._timeline = timeline
        self.may_share = lru_cache(_KEPT)(self._may_share)
        self.is_sliced = lru_cache(_KEPT)(self._is_sliced)
        self.is_informed = lru_cache(_KEPT)(self._is_informed)
        self._in_torch = lru_cache(_KEPT)(self._runs_in_torch)

    def seconds(self, configuration: str, rows: int) -> float:
        """About how long a step on so many images takes, as the service is now."""
        return self._budget.seconds(configuration, rows) * self._pace.get(configuration, 1.0)

    def take(self, jobs: Sequence[Job]) -> list[Done | Exception]:
        """The new state and the answer of each job, or what went wrong with it alone."""
        torch_computes = any(map(self._in_torch, {job.state.configuration for job in jobs}))
        done: list[Done | Exception] = []
        pictures, began = [_picture(job.batch) for job in jobs], time.perf_counter()
        with nullcontext() if torch_computes else one_thread():
            works = [attempt(partial(self._work, *each)) for each in zip(jobs, pictures, strict=True)]
            sound = [work for work in works if isinstance(work, Work)]
            steps = iter(guarded_steps(self._bundle.model, sound, self._bundle.passes, self.influence))
            for job, picture, work in zip(jobs, pictures, works, strict=True):
                step = next(steps) if isinstance(work, Work) else work
                done.append(attempt(partial(self._done, job, picture, step)) if isinstance(step, Step) else step)
        seconds = time.perf_counter() - began
        self._learn([(job.state.configuration, job.batch.shape[0]) for job in jobs], seconds)
        adapters = {job.state.state.adapter for job in jobs}
        adapter = adapters.pop() if len(adapters) == 1 else "several"
        self._metrics.step_seconds.labels(self._bundle.manifest.name, adapter).observe(seconds)
        self._metrics.step_batches.observe(len(jobs))
        self._metrics.step_rows.observe(sum([job.batch.shape[0] for job in jobs]))
        return done

    def slices(self, job: Job) -> Generator[None, None, Done | Exception]:
        """As `take`, for one job whose adapter has a step in slices."""
        picture = _picture(job.batch)
        work = attempt(partial(self._work, job, picture))
        if isinstance(work, Exception):
            return work
        step = yield from guarded_slices(self._bundle.model, work, self.influence)
        return attempt(partial(self._done, job, picture, step)) if isinstance(step, Step) else step

    def _learn(self, taken: Sequence[tuple[str, int]], seconds: float) -> None:
        """Steps were taken together, each with its configuration and number of images."""
        expected = sum([self._budget.seconds(*each) for each in taken])
        if not expected:
            return
        for configuration, _ in taken:
            known = self._pace.get(configuration, 1.0)
            if configuration not in self._pace and len(self._pace) >= _PACED:
                del self._pace[next(iter(self._pace))]
            self._pace[configuration] = known + _LEARNED * (seconds / expected - known)

    def _is_sliced(self, configuration: str) -> bool:
        """Whether steps of an adapter may be interrupted."""
        try:
            return isinstance(self._configurations.adapter(configuration), Sliced)
        except ConfigurationError:
            return False

    def _is_informed(self, configuration: str) -> bool:
        """Whether an adapter chooses by what labels of all clients say."""
        try:
            return isinstance(self._configurations.adapter(configuration), Informed)
        except ConfigurationError:
            return False

    def _may_share(self, configuration: str) -> bool:
        """Whether steps of an adapter can share their passes of the network with others."""
        try:
            adapter = self._configurations.adapter(configuration)
        except ConfigurationError:  # raised again, and dealt with, when the step is taken
            return False
        return mergeable(adapter, self._bundle.model)

    def _runs_in_torch(self, configuration: str) -> bool:
        """Whether torch runs the network in the steps of an adapter."""
        try:
            adapter = self._configurations.adapter(configuration)
        except ConfigurationError:
            return False
        return in_torch(adapter, self._bundle.model, self._bundle.passes)

    def _work(self, job: Job, picture: bytes) -> Work:
        batch = job.batch
        x = self._bundle.prepare(np.frombuffer(batch.data, batch.dtype).reshape(batch.shape))
        adapter = self._configurations.adapter(job.state.configuration)
        repeated = picture != b"" and picture == job.state.picture
        shares, state = job.parameters.shares.get(job.state.configuration), job.state.state
        if shares is not None and isinstance(adapter, Informed):
            state = adapter.informed(state, shares)
        return Work(adapter, state, x, repeated, compare=bool(job.parameters.request_id))

    def _done(self, job: Job, picture: bytes, step: Step) -> Done:
        state, parameters = job.state, job.parameters
        if step.signals.get("fallback"):
            self._metrics.fallbacks.labels(self._bundle.manifest.name, state.state.adapter).inc()
        self._metrics.skipped_rows.inc(round(cast(float, step.signals["skipped"]) * len(step.logits)))
        answer = partial(_encode, step, self._bundle.manifest.classes, parameters, job.batch.skipped)
        if step.frozen_logits is None or not parameters.request_id:
            point = self._point(state.configuration, step, {}, "") if self._timeline else b""
            after = ClientState(state.configuration, step.state, None, picture, point, state.images, state.beside)
            return after, answer(step.logits)
        before = state.record or Record()
        against = parameters.against
        by_policy = against.get(state.configuration) or against.get(EVERY, _ADAPTED)
        own = by_own(before.counts, parameters.alpha)
        decision = own or by_policy
        frozen, adapted = step.frozen_logits.argmax(dim=-1).tolist(), step.logits.argmax(dim=-1).tolist()
        by_arm = () if step.by_arm is None else step.by_arm.tolist()
        record = before.append(parameters.request_id, frozen, adapted, answering=decision.answer, by_arm=by_arm)
        given = step.frozen_logits if decision.answer == "frozen" else step.logits
        switched, guard = decision.answer != before.answering, None
        if switched or decision.answer == "frozen":
            guard = {"answering": decision.answer, "because": decision.because, "switched": switched}
        point = b""
        if self._timeline:
            same = sum(map(int.__eq__, frozen, adapted)) / len(frozen)
            compared = {"agreement": same, "frozen": float(decision.answer == "frozen")}
            verdict = "undecided" if own is None else "harmful" if own.answer == "frozen" else "trusted"
            point = self._point(state.configuration, step, compared, verdict)
        asked: Sequence[int] = ()
        if parameters.ask_budget:
            # where there is a verdict, or no label would change which arm answers, none decides anything any more
            wanted, rivals = own is None, None
            if by_arm and isinstance(adapter := self._configurations.adapter(state.configuration), Informed):
                rivals = adapter.rivals(step.state, most_asked(parameters.ask_budget))
                wanted = rivals is not None
            record, asked = record.ask(parameters.request_id, parameters.ask_budget, wanted=wanted, rivals=rivals)
        after = ClientState(state.configuration, step.state, record, picture, point, state.images, state.beside)
        return after, answer(given, guard, parameters.request_id, asked)

    def _point(self, configuration: str, step: Step, compared: Mapping[str, float], verdict: str) -> bytes:
        """What the timeline says of a batch, as `Point.encode`.

        Args:
            configuration: of the client.
            step: the step.
            compared: what became of adapted and frozen predictions; empty where nobody compares them.
            verdict: of the guard, empty where there is none.
        """
        signals = step.signals
        measured: dict[str, Any] = {name: signals[name] for name in _SHOWN if name in signals}
        prior = signals.get("prior")
        if isinstance(prior, tuple) and len(prior) <= _LONGEST_PRIOR:
            measured["prior"] = prior
        for name in _BY_ROW:
            if isinstance(each := signals.get(name), tuple) and each:
                measured[name] = sum(each) / len(each)
        if step.state.step % _MOVEMENT_EVERY == 1 and (
            modules := movement(self._configurations.adapter(configuration), self._bundle.model, step.state)
        ):
            measured["modules"] = modules
        befell = {name: 1 for name in _BEFELL if signals.get(name)}
        point = Point(
            batches=1, rows=len(step.logits), measured={**measured, **compared}, events=befell, verdict=verdict
        )
        return point.encode()


def _picture(batch: Batch) -> bytes:
    """What tells a batch of one picture from any other; empty for several pictures, which the step itself compares."""
    if batch.shape[0] != 1:
        return b""
    digest = hashlib.blake2b(batch.data, digest_size=PICTURE_BYTES)
    digest.update(f"{batch.dtype}{batch.shape}".encode())
    return digest.digest()


def _encode(
    step: Step,
    classes: Sequence[str],
    parameters: StepParameters,
    skipped_batches: int,
    logits: Tensor,
    guard: Mapping[str, Any] | None = None,
    request_id: str = "",
    ask: Sequence[int] = (),
) -> bytes:
    """The part of a reply that a repeat must get again: adapter, predictions [B], probabilities [B, K], and signals.

    Args:
        step: the adapter's step.
        classes: their names.
        parameters: whether to give the whole posterior, and the logits [B, K].
        skipped_batches: missing in a numbered stream; one more signal, where there are any.
        logits: [B, K], of the prediction that is given: the step's own, or that of the frozen model.
        guard: why it is that one; said where it is the frozen one, or where the batch before was given the other.
        request_id: by which the rows can be told their labels; left out if they are not remembered.
        ask: rows that are worth a label.
    """
    probabilities = logits.double().softmax(dim=-1).cpu()
    confidence, index = probabilities.max(dim=-1)
    answer: dict[str, Any] = {
        "adapter": step.state.adapter,
        "predictions": [
            {"index": i, "label": classes[i], "probability": p}
            for i, p in zip(index.tolist(), confidence.tolist(), strict=True)
        ],
        "signals": {**step.signals, **({"skipped_batches": skipped_batches} if skipped_batches else {})},
    }
    if parameters.probabilities:
        answer["probabilities"] = probabilities.tolist()
    if parameters.logits:
        answer["logits"] = logits.tolist()
    if request_id:
        answer["request_id"] = request_id
    if guard:
        answer["guard"] = guard
    if ask:
        answer["ask"] = ask
    return orjson.dumps(answer)
