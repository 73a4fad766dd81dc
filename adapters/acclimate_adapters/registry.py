"""All adapters by name."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from acclimate_adapters.adapter import Adapter
from acclimate_adapters.balanced.balanced import Balanced
from acclimate_adapters.consensus import Consensus
from acclimate_adapters.errors import ConfigurationError, UnknownAdapter
from acclimate_adapters.hyperparameters import schema as schema_of
from acclimate_adapters.methods.atp import Atp
from acclimate_adapters.methods.bbse import Bbse
from acclimate_adapters.methods.bn_adapt import BnAdapt
from acclimate_adapters.methods.chain import chain
from acclimate_adapters.methods.dynfed import DynFed
from acclimate_adapters.methods.em import Em
from acclimate_adapters.methods.fed_ade.client import FedAde
from acclimate_adapters.methods.fedcal import FedCal
from acclimate_adapters.methods.fedthe.ensemble import FedThe
from acclimate_adapters.methods.fedthe.plus import FedThePlus
from acclimate_adapters.methods.memo import Memo
from acclimate_adapters.methods.none import NoAdaptation
from acclimate_adapters.methods.shot import Shot
from acclimate_adapters.methods.surgical import Surgical
from acclimate_adapters.methods.t3a import T3a
from acclimate_adapters.methods.tent import Tent

ADAPTERS: Mapping[str, type[Adapter]] = {
    "atp": Atp,
    "balanced": Balanced,
    "bbse": Bbse,
    "bn_adapt": BnAdapt,
    "consensus": Consensus,
    "dynfed": DynFed,
    "em": Em,
    "fed_ade": FedAde,
    "fedcal": FedCal,
    "fedthe": FedThe,
    "fedthe_plus": FedThePlus,
    "memo": Memo,
    "none": NoAdaptation,
    "shot": Shot,
    "surgical": Surgical,
    "t3a": T3a,
    "tent": Tent,
}


def create(name: str, /, **hyperparameters: Any) -> Adapter:
    """Make an adapter: `create("atp", mode="batch")`, or a chain: `create("atp+em", atp={"mode": "batch"})`.

    A chain takes the hyper-parameters of each part as a mapping under the name of the part.

    Raises:
        UnknownAdapter: there is no adapter of that name.
        ConfigurationError: a hyper-parameter is unknown or out of range, or the chain makes no sense.
    """
    if "+" in name:
        return _create_chain(name, hyperparameters)
    kind = _kind(name)
    known = [field.name for field in fields(kind)]
    unknown = sorted(hyperparameters.keys() - set(known))
    if unknown:
        raise ConfigurationError(
            f"adapter {name!r} has no hyper-parameter {', '.join(unknown)}; it has {', '.join(known) or 'none'}"
        )
    return kind(**{key: tuple(value) if isinstance(value, list) else value for key, value in hyperparameters.items()})


def schema(name: str) -> dict[str, Any]:
    """JSON schema (draft 2020-12) of the hyper-parameters that `create` takes for an adapter or a chain.

    Raises:
        UnknownAdapter: there is no adapter of that name.
    """
    if "+" not in name:
        return schema_of(_kind(name))
    parts = {part: schema_of(_kind(part)) for part in name.split("+")}
    return {"type": "object", "properties": parts, "additionalProperties": False}


def _kind(name: str) -> type[Adapter]:
    if name not in ADAPTERS:
        raise UnknownAdapter(f"there is no adapter {name!r}; there are {', '.join(sorted(ADAPTERS))}")
    return ADAPTERS[name]


def _create_chain(name: str, hyperparameters: Mapping[str, Any]) -> Adapter:
    parts = name.split("+")
    for part, values in hyperparameters.items():
        if part not in parts or not isinstance(values, Mapping):
            raise ConfigurationError(
                f"chain {name!r} takes the hyper-parameters of each part as a mapping under its name, one of "
                f"{', '.join(parts)}; not {part}={values!r}"
            )
    return chain([create(part, **hyperparameters.get(part, {})) for part in parts])
