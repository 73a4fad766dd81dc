"""Head methods, `balanced` and `consensus` on ONNX Runtime, to be compared with one pass of the plain network in torch.

The graphs are exported anew from the network that is measured, which takes a quarter of a minute. Needs onnxruntime and
the extra `export`.
"""

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final, NamedTuple

from acclimate_adapters import create
from acclimate_adapters.merged import Work, guarded_steps
from acclimate_bench.cost.networks import Network
from acclimate_service.compute.process import one_thread
from acclimate_store.onnx_graphs import export_graphs
from acclimate_store.runtimes import Runtime, choose

HEADS: Final = "em", "fedcal", "bbse", "t3a"
HEAD_TARGET: Final = 1.0
STATISTICS_TARGETS: Final = {"balanced": 1.8, "consensus": 3.4}


class OnnxRow(NamedTuple):
    """A step, and the multiple of a plain pass in torch that it may cost."""

    name: str
    work: Callable[[], object]
    target: float


def onnx_rows(network: Network) -> list[OnnxRow]:
    """Guarded steps of one client as the service takes them, each from the state of the last."""
    runtime = _runtime(network)
    targets = {**dict.fromkeys(HEADS, HEAD_TARGET), **STATISTICS_TARGETS}
    return [
        OnnxRow(f"{name}, ONNX Runtime", _steps(runtime, network, name), target) for name, target in targets.items()
    ]


def _runtime(network: Network) -> Runtime:
    model = network.model.with_layouts(frozen=False, adapted=False)  # as bundles are exported
    graphs = export_graphs(model, network.x.shape[1:], lambda _: None)
    with TemporaryDirectory() as folder:
        for file, graph in graphs.items():
            (Path(folder) / file).write_bytes(graph)
        return choose("onnx", model, Path(folder), dict.fromkeys(graphs, ""), network.x)


def _steps(runtime: Runtime, network: Network, name: str) -> Callable[[], object]:
    adapter = create(name)
    state = adapter.init(network.model)

    def work() -> None:
        nonlocal state
        with one_thread():
            (step,) = guarded_steps(runtime.model, [Work(adapter, state, network.x)], runtime.passes)
        if isinstance(step, Exception):
            raise step
        state = step.state

    return work
