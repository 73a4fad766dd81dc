"""A version in the shadow of those that answer: it is shown a share of the batches, and only compared."""

import time
from typing import Final

from acclimate_service.clients.engine import Batch, Engine
from acclimate_service.clients.requests import BACKGROUND_PATIENCE_S, Caller, Reply, never_gone
from acclimate_service.compute.steps import StepParameters
from acclimate_service.errors import Problem
from acclimate_service.metrics import Metrics
from acclimate_service.state import Tasks

MOST_WAITING: Final = 8
"""Batches that a shadow is at or has before it; those that come beyond are not shown to it."""
RESULTS: Final = ("agreed", "differed", "failed", "left_out")


class Shadow:
    """Shows batches that were answered to another version, frozen and after the reply.

    What was answered and what the shadow would have are counted as agreed or differed, image by image, by the names of
    the classes; `failed` are images that it could not answer, `left_out` those for which it had no time.

    Args:
        model: name of it.
        version: of it, in the shadow.
        engine: of the version.
        share: of the batches that it is shown, in 0..1, drawn by their ids.
        metrics: counts what it makes of them.
        tasks: run what nobody waits for.
    """

    def __init__(self, model: str, version: str, engine: Engine, share: float, metrics: Metrics, tasks: Tasks) -> None:
        self._engine, self._share, self._tasks = engine, share, tasks
        self._task, self._waiting = f"shadow {model}/{version}", 0
        self._rows = {result: metrics.shadow_rows.labels(model, version, result) for result in RESULTS}

    def see(self, batch: Batch, reply: Reply) -> None:
        """Show it a batch that was answered, unless it is behind."""
        if int(batch.request.rid[:8], 16) >= self._share * 2**32:
            return
        if self._waiting == MOST_WAITING:
            self._rows["left_out"].inc(len(batch.images))
            return
        self._waiting += 1
        self._tasks.start(self._task, self._compare(batch, reply)).add_done_callback(self._done)

    async def _compare(self, batch: Batch, reply: Reply) -> None:
        try:
            caller = Caller(deadline=time.monotonic() + BACKGROUND_PATIENCE_S, gone=never_gone)
            other = await self._engine.predict_frozen(batch.images, StepParameters(), caller)
        except Exception as error:
            late = isinstance(error, Problem) and error.code == "deadline_exceeded"
            self._rows["left_out" if late else "failed"].inc(len(batch.images))
            if late:
                return
            raise
        given, would = ([each["label"] for each in answer.members["predictions"]] for answer in (reply, other))
        agreed = sum(one == another for one, another in zip(given, would, strict=True))
        self._rows["agreed"].inc(agreed)
        self._rows["differed"].inc(len(given) - agreed)

    def _done(self, _: object) -> None:
        self._waiting -= 1
