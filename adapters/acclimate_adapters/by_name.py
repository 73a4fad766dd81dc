"""Adapters by name: those that stand for themselves, and chains of them."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, TypeAlias

from acclimate_adapters.adapter import Adapter
from acclimate_adapters.balanced.balanced import Balanced
from acclimate_adapters.consensus import Consensus
from acclimate_adapters.errors import ConfigurationError, UnknownAdapter
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

Kinds: TypeAlias = Mapping[str, type[Adapter]]
"""Adapters by their names."""

SINGLE: Kinds = {
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


def make(kinds: Kinds, name: str, hyperparameters: Mapping[str, Any]) -> Adapter:
    """Make one of these adapters, or a chain of them, as `registry.create` does."""
    if "+" in name:
        return _make_chain(kinds, name, hyperparameters)
    kind = kind_of(kinds, name)
    known = [field.name for field in fields(kind)]
    unknown = sorted(hyperparameters.keys() - set(known))
    if unknown:
        raise ConfigurationError(
            f"adapter {name!r} has no hyper-parameter {', '.join(unknown)}; it has {', '.join(known) or 'none'}"
        )
    return kind(**{key: tuple(value) if isinstance(value, list) else value for key, value in hyperparameters.items()})


def kind_of(kinds: Kinds, name: str) -> type[Adapter]:
    """The class of an adapter; raises UnknownAdapter if there is none of that name."""
    if name not in kinds:
        raise UnknownAdapter(f"there is no adapter {name!r}; there are {', '.join(sorted(kinds))}")
    return kinds[name]


def _make_chain(kinds: Kinds, name: str, hyperparameters: Mapping[str, Any]) -> Adapter:
    parts = name.split("+")
    for part, values in hyperparameters.items():
        if part not in parts or not isinstance(values, Mapping):
            raise ConfigurationError(
                f"chain {name!r} takes the hyper-parameters of each part as a mapping under its name, one of "
                f"{', '.join(parts)}; not {part}={values!r}"
            )
    return chain([make(kinds, part, hyperparameters.get(part, {})) for part in parts])
