"""What can keep the benchmark from running."""

from acclimate_adapters import AcclimateError


class BenchError(AcclimateError, ValueError):
    """The data, a name or a place to write to cannot be used; the message says what can."""
