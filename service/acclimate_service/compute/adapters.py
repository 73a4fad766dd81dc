"""Which adapters a model can be served with, and which one a client runs."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any, Final

import orjson

from acclimate_adapters import ADAPTERS, Adapter, FrozenModel, create, enrols, missing, schema
from acclimate_adapters.adapter import parts_of

CHAINS: Final = ("atp+em", "atp+fedcal", "bn_adapt+em", "bn_adapt+fedcal")
"""The chains that the benchmark compares; any other one that makes sense is served too."""
_KEPT: Final = 256
"""Adapters in memory; making one takes microseconds, so a rare one may be made again."""


class Configurations:
    """Adapters by their stored configuration: adapter name and hyper-parameters as canonical JSON.

    A client keeps the adapter it began with, even when the service's default changes, until it is configured again.

    Attributes:
        adapter: the adapter of a stored configuration, an empty one being the default; raises ConfigurationError where
            this version of the service does not know it.
        settings: hyper-parameters that were chosen for the model, by adapter.
    """

    def __init__(
        self,
        adapter: str,
        hyperparameters: Mapping[str, Any],
        settings: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Take the configuration of clients that have none; raises ConfigurationError when it is wrong."""
        self.settings = settings or {}
        self.default = self.wanted(adapter, hyperparameters)
        self.adapter = lru_cache(_KEPT)(self._adapter)  # clients choose the hyper-parameters: there is no end of them
        self.adapter(self.default)

    def wanted(self, adapter: str, hyperparameters: Mapping[str, Any]) -> str:
        """The configuration of whoever asks for this; what is left out is as it was chosen for the model.

        Raises:
            ConfigurationError: there is no such adapter, or none with these hyper-parameters.
        """
        return canonical(adapter, {**self.settings.get(adapter, {}), **hyperparameters})

    def describe(self, configuration: str) -> dict[str, Any]:
        """Members `adapter` and `hyperparameters` of a stored configuration; those left out have their defaults."""
        stated: dict[str, Any] = orjson.loads(configuration or self.default)
        return stated

    def _adapter(self, configuration: str) -> Adapter:
        stated = self.describe(configuration)
        return create(stated["adapter"], **stated["hyperparameters"])


def canonical(adapter: str, hyperparameters: Mapping[str, Any]) -> str:
    """One text per configuration: those of equal adapters are equal texts, however many defaults they spell out.

    Raises:
        ConfigurationError: there is no such adapter, or none with these hyper-parameters.
    """
    create(adapter, **hyperparameters)
    if "+" in adapter:
        parts = {part: _differing(create(part, **hyperparameters.get(part, {}))) for part in adapter.split("+")}
        differing = {part: values for part, values in parts.items() if values}
    else:
        differing = _differing(create(adapter, **hyperparameters))
    configuration = {"adapter": adapter, "hyperparameters": differing}
    return orjson.dumps(configuration, option=orjson.OPT_SORT_KEYS).decode()


def _differing(adapter: Any) -> dict[str, Any]:
    """The hyper-parameters of an adapter that do not have their defaults; numbers are written in one way."""
    found = {}
    for each in fields(adapter):
        value = getattr(adapter, each.name)
        if value != each.default:
            found[each.name] = float(value) if each.metadata["type"] == "number" else value
    return found


@dataclass(frozen=True, slots=True)
class AvailableAdapter:
    """One adapter or chain, and whether the model can be served with it.

    Args:
        name: as clients are configured with it.
        description: one line.
        enrols: whether it takes labelled images of the client.
        missing: what it needs and the model does not carry; empty when it can be served.
        hyperparameters: JSON schema (draft 2020-12).
    """

    name: str
    description: str
    enrols: bool
    missing: tuple[str, ...]
    hyperparameters: dict[str, Any]


def available_adapters(
    model: FrozenModel,
    allowed: Collection[str] | None = None,
    settings: Mapping[str, Mapping[str, Any]] | None = None,
) -> tuple[AvailableAdapter, ...]:
    """Every adapter, then the chains, each in the order of their names; those alone all of whose parts are allowed.

    Args:
        model: that is to be served.
        allowed: names; None for all.
        settings: hyper-parameters that were chosen for the model, by adapter.
    """
    adapters = {name: create(name) for name in (*sorted(ADAPTERS), *CHAINS)}
    return tuple(
        _available(name, model, (settings or {}).get(name, {}))
        for name, adapter in adapters.items()
        if allowed is None or parts_of(adapter) <= set(allowed)
    )


def summary(
    model: FrozenModel,
    allowed: Collection[str] | None = None,
    settings: Mapping[str, Mapping[str, Any]] | None = None,
) -> str:
    """One line for the operator: what can be served of what is allowed, and what the rest lacks."""
    adapters = [each for each in available_adapters(model, allowed, settings) if each.name in ADAPTERS]
    served = ", ".join(each.name for each in adapters if not each.missing)
    lacking = "; ".join(f"{each.name} lacks {', '.join(each.missing)}" for each in adapters if each.missing)
    return f"adapters {served}" + (f"; not served: {lacking}" if lacking else "")


def _available(name: str, model: FrozenModel, settings: Mapping[str, Any]) -> AvailableAdapter:
    adapter, told = create(name, **settings), schema(name)
    for parameter, value in settings.items():
        told["properties"][parameter]["default"] = value
    return AvailableAdapter(
        name=name,
        description=_description(name),
        enrols=enrols(adapter),
        missing=missing(adapter, model),
        hyperparameters=told,
    )


def _description(name: str) -> str:
    if "+" in name:
        first, last = name.split("+")
        return f"{first}, then {last} on what it answers."
    return (ADAPTERS[name].__doc__ or "").partition("\n")[0]
