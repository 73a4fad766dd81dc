"""All adapters by name."""

from typing import Any

from acclimate_adapters.adapter import Adapter
from acclimate_adapters.by_name import SINGLE, Kinds, kind_of, make
from acclimate_adapters.hyperparameters import schema as schema_of
from acclimate_adapters.portfolio import Portfolio

ADAPTERS: Kinds = {**SINGLE, "portfolio": Portfolio}


def create(name: str, /, **hyperparameters: Any) -> Adapter:
    """Make an adapter: `create("atp", mode="batch")`, or a chain: `create("atp+em", atp={"mode": "batch"})`.

    A chain takes the hyper-parameters of each part as a mapping under the name of the part.

    Raises:
        UnknownAdapter: there is no adapter of that name.
        ConfigurationError: a hyper-parameter is unknown or out of range, or the chain makes no sense.
    """
    return make(ADAPTERS, name, hyperparameters)


def schema(name: str) -> dict[str, Any]:
    """JSON schema (draft 2020-12) of the hyper-parameters that `create` takes for an adapter or a chain.

    Raises:
        UnknownAdapter: there is no adapter of that name.
    """
    if "+" not in name:
        return schema_of(kind_of(ADAPTERS, name))
    parts = {part: schema_of(kind_of(ADAPTERS, part)) for part in name.split("+")}
    return {"type": "object", "properties": parts, "additionalProperties": False}
