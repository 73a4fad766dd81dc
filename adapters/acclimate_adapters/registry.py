"""All adapters by name."""

from collections.abc import Mapping
from typing import Any

from acclimate_adapters.adapter import Adapter
from acclimate_adapters.atp import Atp
from acclimate_adapters.errors import ConfigurationError, UnknownAdapter
from acclimate_adapters.none import NoAdaptation

ADAPTERS: Mapping[str, type[Adapter]] = {"atp": Atp, "none": NoAdaptation}


def create(name: str, **hyperparameters: Any) -> Adapter:
    """Make an adapter: `create("atp", mode="batch")`.

    Raises:
        UnknownAdapter: there is no adapter of that name.
        ConfigurationError: a hyper-parameter is unknown or out of range.
    """
    if name not in ADAPTERS:
        raise UnknownAdapter(f"there is no adapter {name!r}; there are {', '.join(sorted(ADAPTERS))}")
    kind = ADAPTERS[name]
    unknown = sorted(hyperparameters.keys() - kind.__dataclass_fields__.keys())
    if unknown:
        known = ", ".join(kind.__dataclass_fields__) or "none"
        raise ConfigurationError(f"adapter {name!r} has no hyper-parameter {', '.join(unknown)}; it has {known}")
    return kind(**{key: tuple(value) if isinstance(value, list) else value for key, value in hyperparameters.items()})
