"""Steps as the thread takes them that runs torch: several clients' batches in, their new states and answers out."""

from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import Final, NamedTuple, TypeAlias

import numpy as np

from acclimate_adapters import ConfigurationError, Step
from acclimate_adapters.merged import Work, attempt, guarded_steps, in_torch, mergeable
from acclimate_service.compute import answers
from acclimate_service.compute.adapted import Adapted
from acclimate_service.compute.batches import Asked
from acclimate_service.compute.configuration import Configurations
from acclimate_service.compute.threads import one_thread
from acclimate_service.guard.policy import Decision, by_own
from acclimate_service.guard.record import Record
from acclimate_service.metrics import Telemetry
from acclimate_service.state import Batch
from acclimate_store import Bundle

Done: TypeAlias = tuple[Adapted, bytes]
_ADAPTED: Final = Decision("adapted", "fleet_not_behind")


class Job(NamedTuple):
    """A client's state, the batch to be folded into it, and what is asked of the batch."""

    state: Adapted
    batch: Batch
    asked: Asked


class Steps:
    """Takes guarded steps, and says what the guard by labels makes of them."""

    def __init__(self, bundle: Bundle, configurations: Configurations, telemetry: Telemetry) -> None:
        self._bundle = bundle
        self._configurations = configurations
        self._telemetry = telemetry

    def may_share(self, job: Job) -> bool:
        """Whether the step can share its passes of the network with others."""
        try:
            adapter = self._configurations.adapter(job.state.configuration)
        except ConfigurationError:  # raised anew, and dealt with, when the step is taken
            return False
        return mergeable(adapter, self._bundle.model)

    def _in_torch(self, jobs: Sequence[Job]) -> bool:
        """Whether torch runs the network in the step of a job."""
        model, passes = self._bundle.model, self._bundle.passes
        adapters = [attempt(partial(self._configurations.adapter, job.state.configuration)) for job in jobs]
        return any(not isinstance(each, Exception) and in_torch(each, model, passes) for each in adapters)

    def take(self, jobs: Sequence[Job]) -> list[Done | Exception]:
        """The new state and the answer of each job, or what went wrong with it alone."""
        with self._telemetry.step_seconds.time(), nullcontext() if self._in_torch(jobs) else one_thread():
            works = [attempt(partial(self._work, job)) for job in jobs]
            sound = [work for work in works if isinstance(work, Work)]
            steps = iter(guarded_steps(self._bundle.model, sound, self._bundle.passes))
            outcomes = [next(steps) if isinstance(work, Work) else work for work in works]
            done = [self._done(job, outcome) for job, outcome in zip(jobs, outcomes, strict=True)]
        self._telemetry.step_batches.observe(len(jobs))
        self._telemetry.step_rows.observe(sum(job.batch.shape[0] for job in jobs))
        return done

    def take_one(self, job: Job) -> Done:
        """The new state and the answer of one job; raises what went wrong."""
        (done,) = self.take([job])
        if isinstance(done, Exception):
            raise done
        return done

    def _work(self, job: Job) -> Work:
        batch = job.batch
        x = self._bundle.prepare(np.frombuffer(batch.data, batch.dtype).reshape(batch.shape))
        adapter = self._configurations.adapter(job.state.configuration)
        return Work(adapter, job.state.state, x, compare=bool(job.asked.request_id))

    def _done(self, job: Job, outcome: Step | Exception) -> Done | Exception:
        return attempt(partial(self._answer, job, outcome)) if isinstance(outcome, Step) else outcome

    def _answer(self, job: Job, step: Step) -> Done:
        state, batch, asked = job
        classes = self._bundle.manifest.classes
        if step.frozen_logits is None or not asked.request_id:
            answer = answers.encode(step, step.logits, classes, asked.probabilities, batch.skipped)
            return Adapted(state.configuration, step.state), answer
        before = state.record or Record()
        decision = by_own(before.counts, asked.alpha) or asked.against.get(state.configuration, _ADAPTED)
        classes_of = (logits.argmax(dim=-1).tolist() for logits in (step.frozen_logits, step.logits))
        record = before.append(asked.request_id, *classes_of, answering=decision.answer)
        given = step.frozen_logits if decision.answer == "frozen" else step.logits
        answer = answers.encode(
            *(step, given, classes, asked.probabilities, batch.skipped, asked.request_id, decision),
            switched=decision.answer != before.answering,
        )
        return Adapted(state.configuration, step.state, record), answer
