"""A replica that takes steps without any serving, too, where a benchmark asks it to.

    python -m acclimate_bench.cost.stepping_replica

One process is to do both: the same step of a ResNet-18 is 2 to 5 % slower or faster in one process than in the next,
for as long as they live (presumably by where their memory lies), which is as much as serving costs.
"""

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Final

import httpx
from fastapi import FastAPI

from acclimate_adapters import Adapter
from acclimate_adapters.merged import Work, guarded_steps, in_torch
from acclimate_bench.cost.inputs import noise
from acclimate_bench.cost.remote import local
from acclimate_bench.cost.replica import PATIENCE_S, Replica, running
from acclimate_service.compute.adapters import canonical
from acclimate_service.compute.process import one_thread
from acclimate_service.replica import Replica as Process
from acclimate_service.serving import serve
from acclimate_service.settings import read_settings
from acclimate_service.state import always
from acclimate_store import Bundle

_COMMAND: Final = (sys.executable, "-m", "acclimate_bench.cost.stepping_replica")
_PATH: Final = "/bench/steps"


def replica_with_steps(data_dir: Path, **settings: object) -> AbstractContextManager[Replica]:
    """As `replica`, for `in_process`."""
    return running(_COMMAND, data_dir, **settings)


def in_process(served: Replica, adapter: str, times: int) -> list[float]:
    """Seconds of each of so many guarded steps of an adapter, one after the other."""
    reply = httpx.post(f"{served.url}{_PATH}", params={"adapter": adapter, "times": times}, timeout=PATIENCE_S)
    seconds: list[float] = reply.raise_for_status().json()
    return seconds


def add_steps(app: FastAPI, replica: Process) -> None:
    """Add the route that takes steps, on the thread that takes those of clients."""
    works, service = dict[str, Callable[[], None]](), replica.service

    async def take(adapter: str, times: int) -> list[float]:
        if adapter not in works:
            works[adapter] = steps(service.bundle, service.configurations.adapter(canonical(adapter, {})))
        return await service.worker.run(lambda: local(works[adapter])(times), always)

    app.add_api_route(_PATH, take, methods=["POST"])


def steps(bundle: Bundle, adapter: Adapter) -> Callable[[], None]:
    """Takes a guarded step on 20 images yet to be normalised, each time from where the last one led."""
    model, images = bundle.model, noise(*bundle.manifest.input.shape)
    state = adapter.init(model)

    def take() -> None:
        nonlocal state
        with nullcontext() if in_torch(adapter, model, bundle.passes) else one_thread():
            work = Work(adapter, state, bundle.prepare(images), compare=True)
            (step,) = guarded_steps(model, [work], bundle.passes)
        if isinstance(step, Exception):
            raise step
        state = step.state

    return take


if __name__ == "__main__":
    serve(read_settings(), add_steps)
