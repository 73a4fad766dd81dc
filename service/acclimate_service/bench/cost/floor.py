"""An adapter's steps without any serving, as work of a process of its own.

python -m acclimate_service.bench.cost.floor BUNDLES MODEL ADAPTER
"""

import sys
from collections.abc import Callable
from pathlib import Path

from acclimate_adapters import create
from acclimate_service.bench.cost.inputs import noise
from acclimate_service.bench.cost.remote import local, obey
from acclimate_service.memory import keep_freed_memory
from acclimate_store import Catalogue


def steps(bundles: Path, model: str, adapter_name: str) -> Callable[[], object]:
    """One step after the other on a batch of 20 images: normalisation and adapter."""
    bundle = Catalogue(bundles).load(model, "1")
    adapter = create(adapter_name)
    state, images = adapter.init(bundle.model), noise(*bundle.manifest.input.shape)

    def work() -> None:
        nonlocal state
        state = adapter.step(bundle.model, state, bundle.prepare(images)).state

    return work


if __name__ == "__main__":
    keep_freed_memory()  # as the service does
    obey(local(steps(Path(sys.argv[1]), *sys.argv[2:])))
