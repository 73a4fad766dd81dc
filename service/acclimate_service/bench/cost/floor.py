"""An adapter's guarded steps without any serving, as work of a process of its own.

python -m acclimate_service.bench.cost.floor BUNDLES MODEL ADAPTER RUNTIME
"""

import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import cast

from acclimate_adapters import create
from acclimate_adapters.merged import Work, guarded_steps, in_torch
from acclimate_service.bench.cost.inputs import noise
from acclimate_service.bench.cost.remote import local, obey
from acclimate_service.memory import keep_freed_memory
from acclimate_service.threads import one_thread
from acclimate_store import Catalogue
from acclimate_store.layout_choice import fastest
from acclimate_store.runtimes import Choice


def steps(bundles: Path, name: str, adapter_name: str, runtime: str) -> Callable[[], object]:
    """Guarded steps, one after the other, on a batch of 20 images to be normalised, on what computes in a service."""
    bundle = Catalogue(bundles).load(name, "1", runtime=cast("Choice", runtime))
    shape = bundle.manifest.input.shape
    model, _ = fastest(bundle.model, shape)
    adapter = create(adapter_name)
    state, images = adapter.init(model), noise(*shape)

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
    keep_freed_memory()  # as the service does
    obey(local(steps(Path(sys.argv[1]), *sys.argv[2:])))
