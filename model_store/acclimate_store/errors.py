"""What can be wrong with a bundle.

AcclimateError
└── BundleError
    ├── BundleNotFound          no such name or version in the catalogue
    ├── BundleExists            a published version is never written again
    ├── ManifestError           manifest.json or source.json is missing, malformed or contradicts itself
    ├── IntegrityError          a file is missing, changed, or not in the manifest
    ├── ArchitectureError       the network cannot be built, or is not allowed
    ├── TensorError             weights or source tensors do not fit the network
    ├── SampleError             a file is no set of sample streams, or of labelled images
    ├── MeasureError            labelled images cannot be used, or show that something is wrong with the bundle
    ├── GoldenError             a model answers its golden batch otherwise than where it was published
    └── GraphError              an ONNX graph cannot be made of a model, or is that of another one
"""

from collections.abc import Iterable

from acclimate_adapters.errors import AcclimateError


class BundleError(AcclimateError):
    """Base of all errors of the model store; the message says what to do.

    Attributes:
        problems: everything that was found, one entry each; the message alone when there is nothing to itemise.
    """

    def __init__(self, message: str, problems: Iterable[str] = ()) -> None:
        found = tuple(problems)
        super().__init__("\n  ".join([message, *found]))
        self.problems = found or (message,)


class BundleNotFound(BundleError, LookupError):
    """No such name or version in the catalogue; the message lists those that exist."""


class BundleExists(BundleError):
    """The target of a write exists already: bundles are immutable, so publish a new version."""


class ManifestError(BundleError, ValueError):
    """`manifest.json` or `source.json` is missing, malformed or contradicts itself."""


class IntegrityError(BundleError):
    """The files of a bundle are not those its manifest lists."""


class ArchitectureError(BundleError, ValueError):
    """The architecture is unknown, refuses its options, or is not allowed by the operator."""


class TensorError(BundleError, ValueError):
    """Tensors are missing, unknown, misshaped, non-finite, or out of their range."""


class SampleError(BundleError, ValueError):
    """A file is no set of sample streams, or of labelled images."""


class MeasureError(BundleError, ValueError):
    """Labelled images cannot be used, or show that something is wrong with the bundle; the message says what."""


class GraphError(BundleError, ValueError):
    """An ONNX graph cannot be made of a model, or is that of another one."""


class GoldenError(BundleError, ValueError):
    """A model answers its golden batch otherwise than where it was published, and must not serve here."""
