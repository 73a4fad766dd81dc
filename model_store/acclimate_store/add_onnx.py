"""The graphs of a bundle's model for ONNX Runtime, published with it as a new version."""

from collections.abc import Callable, Sequence
from importlib.util import find_spec

from acclimate_adapters import FrozenModel
from acclimate_store.catalogue import BundleKey, Catalogue
from acclimate_store.errors import GraphError
from acclimate_store.versions import next_version, publish, renewed

NEEDED = "onnxruntime", "onnx", "onnxscript"


def add_onnx(catalogue: Catalogue, key: BundleKey, version: str | None, progress: Callable[[str], None]) -> BundleKey:
    """Export the passes of a model and publish the bundle with them, which replace any it had.

    They are `frozen.onnx` and, where a model has the BatchNorm layers and class moments for them, those of
    `balanced`.

    Args:
        catalogue: of the store.
        key: the bundle; without a version the newest.
        version: of the new bundle; by default the next one after the newest.
        progress: told what is being done.

    Returns:
        The key of the new bundle.

    Raises:
        BundleError: there is no such bundle; or its model cannot be exported, or answers otherwise as a graph.
    """
    _require_exporter()
    from acclimate_store.onnx_graphs import export_graphs  # needs an extra

    key = catalogue.resolve(*key)
    new = BundleKey(key.name, version or next_version(catalogue.resolve(key.name)))
    bundle = catalogue.load(*key)
    manifest = renewed(catalogue, bundle.manifest, new, f"ONNX graphs exported from {key}.")
    graphs = export_graphs(bundle.model, bundle.manifest.input.shape, progress)
    progress(f"checking against torch and publishing {new}")
    publish(catalogue, key, manifest, bundle.model.source, graphs)
    return new


def graphs_where_possible(model: FrozenModel, shape: Sequence[int]) -> tuple[dict[str, bytes], tuple[str, ...]]:
    """The graphs of a model by file, and why there are none.

    Args:
        model: in single precision, on the CPU.
        shape: C, H and W of its input.
    """
    lacking = _lacking()
    if lacking:
        return {}, (f'no ONNX graphs: {", ".join(lacking)} not installed; pip install "acclimate[cpu,export]"',)
    from acclimate_store.onnx_graphs import export_graphs  # needs an extra

    try:
        return export_graphs(model, shape, lambda what: None), ()
    except GraphError as error:
        return {}, (f"no ONNX graphs, torch will compute: {str(error).splitlines()[0]}",)


def _lacking() -> list[str]:
    return [name for name in NEEDED if find_spec(name) is None]


def _require_exporter() -> None:
    lacking = _lacking()
    if lacking:
        raise GraphError(
            f'exporting needs {", ".join(lacking)}; the extras "cpu" and "export" have them: '
            'pip install "acclimate[cpu,export]"'
        )
