"""The graphs of a bundle's model for ONNX Runtime, published with it as a new version."""

from collections.abc import Callable, Sequence
from importlib.util import find_spec

from acclimate_adapters import FrozenModel, create, missing
from acclimate_adapters.balanced.moments import layer_widths
from acclimate_store.catalogue import BundleKey, Catalogue
from acclimate_store.errors import GraphError
from acclimate_store.integrity import BALANCED_GRAPH, FROZEN_GRAPH, STEM_GRAPH
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
    key = catalogue.resolve(*key)
    new = BundleKey(key.name, version or next_version(catalogue.resolve(key.name)))
    bundle = catalogue.load(*key)
    manifest = renewed(catalogue, bundle.manifest, new, f"ONNX graphs exported from {key}.")
    graphs = export_graphs(bundle.model, bundle.manifest.input.shape, progress)
    progress(f"checking against torch and publishing {new}")
    publish(catalogue, key, manifest, bundle.model.source, graphs)
    return new


def export_graphs(model: FrozenModel, shape: Sequence[int], progress: Callable[[str], None]) -> dict[str, bytes]:
    """The graphs that a model can have, by file.

    Args:
        model: in single precision, on the CPU.
        shape: C, H and W of its input.
        progress: told what is being done.

    Raises:
        GraphError: it cannot be exported.
    """
    from acclimate_store.balanced_onnx import export_balanced, export_stem  # they need an extra
    from acclimate_store.frozen_onnx import export_frozen

    exports = {FROZEN_GRAPH: export_frozen}
    if layer_widths(model) and not missing(create("balanced"), model):
        exports |= {STEM_GRAPH: export_stem, BALANCED_GRAPH: export_balanced}
    graphs = {}
    for file, export in exports.items():
        progress(f"exporting {file}")
        try:
            graphs[file] = export(model, shape)
        except Exception as error:  # the exporter raises anything
            raise GraphError(f"{file} cannot be exported: {error}") from error
    return graphs


def _require_exporter() -> None:
    lacking = [name for name in NEEDED if find_spec(name) is None]
    if lacking:
        raise GraphError(
            f'exporting needs {", ".join(lacking)}; the extras "cpu" and "export" have them: '
            'pip install "acclimate[cpu,export]"'
        )
