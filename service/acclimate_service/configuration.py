"""Which adapter a client runs, as it is written beside its state."""

from collections.abc import Mapping
from typing import Any

import orjson

from acclimate_adapters import Adapter, create


class Configurations:
    """Adapters by their stored configuration: adapter name and hyper-parameters as canonical JSON.

    A client keeps the adapter it began with, even when the service's default changes, until it is configured anew.
    """

    def __init__(self, adapter: str, hyperparameters: Mapping[str, Any]) -> None:
        """Take the configuration of clients that have none; raises ConfigurationError when it is wrong."""
        self.default = canonical(adapter, hyperparameters)
        self._adapters: dict[str, Adapter] = {}
        self.adapter(self.default)

    def adapter(self, configuration: str) -> Adapter:
        """The adapter of a stored configuration; an empty one means the default.

        Raises:
            ConfigurationError: this version of the service does not know it.
        """
        configuration = configuration or self.default
        if configuration not in self._adapters:
            fields = orjson.loads(configuration)
            self._adapters[configuration] = create(fields["adapter"], **fields["hyperparameters"])
        return self._adapters[configuration]


def canonical(adapter: str, hyperparameters: Mapping[str, Any]) -> str:
    """One text per configuration: equal ones are equal texts."""
    fields = {"adapter": adapter, "hyperparameters": dict(hyperparameters)}
    return orjson.dumps(fields, option=orjson.OPT_SORT_KEYS).decode()
