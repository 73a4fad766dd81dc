"""Which adapter a client runs, as it is written beside its state."""

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import orjson

from acclimate_adapters import Adapter, create

_KEPT = 256
"""Adapters in memory; making one takes microseconds, so a rare one may be made again."""


class Configurations:
    """Adapters by their stored configuration: adapter name and hyper-parameters as canonical JSON.

    A client keeps the adapter it began with, even when the service's default changes, until it is configured anew.
    """

    def __init__(self, adapter: str, hyperparameters: Mapping[str, Any]) -> None:
        """Take the configuration of clients that have none; raises ConfigurationError when it is wrong."""
        self.default = canonical(adapter, hyperparameters)
        self._create = lru_cache(_KEPT)(_create)  # clients choose the hyper-parameters: there is no end of them
        self.adapter(self.default)

    def adapter(self, configuration: str) -> Adapter:
        """The adapter of a stored configuration; an empty one means the default.

        Raises:
            ConfigurationError: this version of the service does not know it.
        """
        return self._create(configuration or self.default)

    def describe(self, configuration: str) -> dict[str, Any]:
        """Members `adapter` and `hyperparameters` of a stored configuration; those left out have their defaults."""
        fields: dict[str, Any] = orjson.loads(configuration or self.default)
        return fields


def canonical(adapter: str, hyperparameters: Mapping[str, Any]) -> str:
    """One text per configuration: equal ones are equal texts."""
    fields = {"adapter": adapter, "hyperparameters": dict(hyperparameters)}
    return orjson.dumps(fields, option=orjson.OPT_SORT_KEYS).decode()


def _create(configuration: str) -> Adapter:
    fields = orjson.loads(configuration)
    return create(fields["adapter"], **fields["hyperparameters"])
