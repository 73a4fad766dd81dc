"""What the settings choose: model, adapters, limits, Redis. What cannot be is a `SettingsError` naming its variable."""

from dataclasses import replace

import torch

from acclimate_adapters import ConfigurationError, FrozenModel, create, missing, require
from acclimate_service.compute.configuration import Configurations, canonical
from acclimate_service.settings import Settings, SettingsError
from acclimate_service.state import Limits, Link, check_windows, connect
from acclimate_store import Bundle, BundleKey, Catalogue
from acclimate_store.layout_choice import fastest

RETRY_WINDOW_MS = 600_000
"""Longest time within which callers are expected to retry a request."""


def load_bundle(settings: Settings) -> Bundle:
    """The model that is to be served; raises BundleError and SettingsError.

    Its passes are laid out in memory as they are fastest, unless replicas must agree to the last bit.
    """
    catalogue = Catalogue(settings.model_store, settings.allowed_imports)
    bundle = catalogue.load(*BundleKey.parse(settings.model), _device(settings.device), settings.runtime)
    if settings.strict_replay:
        return bundle
    model, layout = fastest(bundle.model, bundle.manifest.input.shape)
    return replace(bundle, model=model, layout=layout)


def default_adapter(model: FrozenModel) -> str:
    """`atp` for a model with learned rates, which encode the shifts of the source clients; else `none`."""
    return "none" if missing(create("atp"), model) else "atp"


def _device(name: str) -> torch.device:
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:  # torch raises either, depending on how it was built
        raise SettingsError(f"ACCLIMATE_DEVICE: {name} is not there: {str(error).splitlines()[0]}") from error


def configurations_of(settings: Settings, model: FrozenModel) -> Configurations:
    """The adapters, and what clients begin with that choose none; raises SettingsError."""
    try:
        configurations = Configurations(settings.adapter or default_adapter(model), settings.adapter_options)
        require(configurations.adapter(configurations.default), model)
    except ConfigurationError as error:
        raise SettingsError(f"ACCLIMATE_ADAPTER, ACCLIMATE_ADAPTER_OPTIONS: {error}") from error
    return configurations


def limits_of(settings: Settings) -> Limits:
    """Of the state protocol; raises SettingsError where they contradict each other."""
    limits = Limits(inline_max=settings.inline_max, state_ttl_ms=settings.state_ttl_s * 1000)
    try:
        check_windows(limits, longest_request_ms=settings.request_timeout_ms, retry_window_ms=RETRY_WINDOW_MS)
    except ValueError as error:
        raise SettingsError(f"ACCLIMATE_STATE_TTL_S, ACCLIMATE_REQUEST_TIMEOUT_MS: {error}") from error
    return limits


async def connected(url: str) -> Link:
    """A way to the Redis at this URL; raises SettingsError if it is none."""
    try:
        return await connect(url)
    except (ValueError, TypeError) as error:
        raise SettingsError(f"ACCLIMATE_REDIS_URL: {error}") from error


def candidates_of(settings: Settings, model: FrozenModel) -> list[str]:
    """Configurations of the candidates; raises SettingsError for one that the model cannot serve."""
    try:
        for name in settings.candidates:
            require(create(name), model)
    except ConfigurationError as error:
        raise SettingsError(f"ACCLIMATE_CANDIDATES: {error}") from error
    return [canonical(name, {}) for name in settings.candidates]
