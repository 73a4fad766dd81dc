"""The models that are to be served: the settings of each, its bundle, its adapters and what their steps cost."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Final, NamedTuple

import torch

from acclimate_adapters import ConfigurationError, FrozenModel, create, require
from acclimate_service.compute.adapters import Configurations
from acclimate_service.compute.costs import Prices, StepBudget
from acclimate_service.compute.worker import Worker
from acclimate_service.errors import Problem
from acclimate_service.settings import Settings, SettingsError
from acclimate_service.state import always
from acclimate_store import Bundle, BundleKey, Catalogue
from acclimate_store.layout_choice import fastest
from acclimate_store.vision import torchvision

_LONGEST_TENANT: Final = 128
"""Characters that the keys of clients may have for it."""


class Model(NamedTuple):
    """A model that is to be served.

    Args:
        settings: for it.
        bundle: as it is laid out in memory.
        configurations: of its clients.
        candidates: configurations that are tried out beside those.
        budget: what a step may cost.
    """

    settings: Settings
    bundle: Bundle
    configurations: Configurations
    candidates: list[str]
    budget: StepBudget


def settings_by_model(settings: Settings) -> list[Settings]:
    """The settings of each model, the default one first, which has the plain tenant; they share what memory there is.

    Raises:
        SettingsError: a model is named twice, or a tenant becomes too long.
    """
    named = dict.fromkeys(key for key in (settings.model, *settings.models) if key is not None)
    keys: list[str | None] = [*named] or [None]
    names = ["" if key is None else BundleKey.parse(key).name for key in keys]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise SettingsError(f"ACCLIMATE_MODELS: {', '.join(twice)} is there in two versions; one process serves one")
    share = {
        "cache_bytes": settings.cache_bytes // len(keys),
        "device_cache_bytes": settings.device_cache_bytes // len(keys),
        "drain_budget_s": settings.drain_budget_s / len(keys),
    }
    found = list[Settings]()
    for key, name in zip(keys, names, strict=True):
        tenant = f"{settings.tenant}~{name}" if found else settings.tenant
        if len(tenant) > _LONGEST_TENANT:
            raise SettingsError(f"ACCLIMATE_TENANT: {tenant} has more than {_LONGEST_TENANT} characters")
        found.append(settings.model_copy(update={**share, "model": key, "tenant": tenant}))
    return found


async def load_model(settings: Settings, worker: Worker) -> Model:
    """Load a model and refuse settings that it cannot serve; raises as `open_replica`."""
    bundle = await worker.run(partial(_load_bundle, settings), always)
    configurations = _configurations(settings, bundle)
    candidates = _challenger_configurations(settings, bundle.model, configurations)
    prices = await worker.run(partial(Prices.measured, bundle), always)
    budget = StepBudget(bundle.model, configurations, prices, settings.max_step_ms / 1000, settings.adapters)
    _require_affordable(budget, configurations.default, candidates)
    return Model(settings, bundle, configurations, candidates, budget)


def _load_bundle(settings: Settings) -> Bundle:
    """The model that is to be served; raises BundleError and SettingsError.

    Its passes are laid out in memory as they are fastest, unless replicas must agree to the last bit.
    """
    catalogue = Catalogue(settings.model_store, settings.allowed_imports)
    bundle = catalogue.load(*named(settings.model, catalogue), device_of(settings.device), settings.runtime)
    if bundle.manifest.input.resize is not None:
        torchvision("transforms.v2.functional")  # it takes seconds: now, not while the first client waits
    if settings.strict_replay:
        return bundle
    model, layout = fastest(bundle.model, bundle.manifest.input.shape)
    return replace(bundle, model=model, layout=layout)


def named(model: str | None, catalogue: Catalogue) -> BundleKey:
    """The bundle that the settings name, or the only one that there is."""
    if model is not None:
        return BundleKey.parse(model)
    names = sorted({key.name for key in catalogue.list()})
    match names:
        case [name]:
            return BundleKey(name)
        case []:
            raise SettingsError(
                f"ACCLIMATE_MODEL_STORE: {catalogue.root} holds no bundle; `acclimate models create` makes one"
            )
    raise SettingsError(f"ACCLIMATE_MODEL: name one of the bundles in {catalogue.root}: {', '.join(names)}")


def device_of(name: str) -> torch.device:
    """The device of this name; raises SettingsError where it is not there."""
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:  # torch raises either, depending on how it was built
        raise SettingsError(f"ACCLIMATE_DEVICE: {name} is not there: {str(error).splitlines()[0]}") from error


def _configurations(settings: Settings, bundle: Bundle) -> Configurations:
    """The adapters, and what clients begin with that choose none: what the bundle has proven; raises SettingsError."""
    name, options = settings.adapter, settings.adapter_options
    if name is None:
        default = bundle.default(settings.adapters)
        name, options = default.adapter, {**default.options, **options}
    try:
        configurations = Configurations(name, options, bundle.manifest.options)
        require(configurations.adapter(configurations.default), bundle.model)
    except ConfigurationError as error:
        raise SettingsError(f"ACCLIMATE_ADAPTER, ACCLIMATE_ADAPTER_OPTIONS: {error}") from error
    return configurations


def _challenger_configurations(settings: Settings, model: FrozenModel, configurations: Configurations) -> list[str]:
    """Of the candidates; raises SettingsError for one that the model cannot serve."""
    try:
        for name in settings.candidates:
            require(create(name), model)
    except ConfigurationError as error:
        raise SettingsError(f"ACCLIMATE_CANDIDATES: {error}") from error
    return [configurations.wanted(name, {}) for name in settings.candidates]


def _require_affordable(budget: StepBudget, default: str, candidates: Sequence[str]) -> None:
    """Raise SettingsError where no image could be answered by what the operator has chosen."""
    for variable, configurations in (("ACCLIMATE_ADAPTER", [default]), ("ACCLIMATE_CANDIDATES", candidates)):
        for configuration in configurations:
            try:
                budget.require(configuration)
            except Problem as problem:
                raise SettingsError(f"{variable}: {problem}") from problem
