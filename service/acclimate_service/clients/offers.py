"""Which adapters a model can be served with, and what each takes."""

from dataclasses import dataclass
from typing import Any, Final

from acclimate_adapters import ADAPTERS, Adapter, FrozenModel, create, enrols, missing, schema

CHAINS: Final = ("atp+em", "atp+fedcal", "bn_adapt+em", "bn_adapt+fedcal")
"""The chains that the benchmark compares; any other one that makes sense is served too."""


@dataclass(frozen=True, slots=True)
class Offer:
    """One adapter or chain.

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


def offers(model: FrozenModel) -> tuple[Offer, ...]:
    """Every adapter, then the chains, each in the order of their names."""
    return tuple(_offer(name, create(name), model) for name in (*sorted(ADAPTERS), *CHAINS))


def summary(model: FrozenModel) -> str:
    """One line for the operator: what can be served, and what the rest lacks."""
    adapters = [offer for offer in offers(model) if offer.name in ADAPTERS]
    served = ", ".join(offer.name for offer in adapters if not offer.missing)
    lacking = "; ".join(f"{offer.name} lacks {', '.join(offer.missing)}" for offer in adapters if offer.missing)
    return f"adapters {served}" + (f"; not served: {lacking}" if lacking else "")


def _offer(name: str, adapter: Adapter, model: FrozenModel) -> Offer:
    return Offer(name, _describe(name), enrols(adapter), missing(adapter, model), schema(name))


def _describe(name: str) -> str:
    if "+" in name:
        first, last = name.split("+")
        return f"{first}, then {last} on what it answers."
    return (ADAPTERS[name].__doc__ or "").partition("\n")[0]
