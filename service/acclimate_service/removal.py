"""`acclimate models remove`: versions of a model leave the store, unless clients live on them."""

import argparse
import asyncio
import sys
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Final, TypeAlias

from acclimate_adapters import AcclimateError
from acclimate_service.compute.lineage import known_versions
from acclimate_service.opening import connected
from acclimate_service.serving import new_event_loop
from acclimate_service.settings import Settings, SettingsError, read_settings
from acclimate_service.state import (
    EmbeddedRedis,
    EmbeddedRedisError,
    StateError,
    Wire,
    clients_of_version,
    running_at,
)
from acclimate_store import BundleError, BundleKey, Catalogue
from acclimate_store.identity import Identity, read_identity
from acclimate_store.versions import remove

ERRORS: Final = (SettingsError, AcclimateError, StateError, EmbeddedRedisError)
"""What ends the command with its message alone."""
Meaning: TypeAlias = tuple[str, str]
"""What states are stamped with: the identity of a version, and the content of its model."""


def run_remove(arguments: argparse.Namespace) -> int:
    """Remove a version, or all of a name; 1 if clients live on one and nobody insists, and then all stay."""
    catalogue, asked = Catalogue(arguments.store), BundleKey.parse(arguments.bundle)
    catalogue.resolve(*asked)
    versions = [key for key in catalogue.list() if key.name == asked.name]
    keys = [key for key in versions if asked.version in (None, key.version)]
    staying = {_meaning_in_store(catalogue, key) for key in versions if key not in keys}
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        living = runner.run(_living(read_settings(), keys, staying))
    for key, clients in zip(keys, living, strict=True):
        if clients:
            print(f"{key}: {clients} client{'s live' if clients > 1 else ' lives'} on it", file=sys.stderr)
    if any(living) and not arguments.force:
        print(
            f"acclimate: nothing was removed; serve another version until its clients have come over (`acclimate "
            f"models compare` says what becomes of their states), or remove {asked} with --force",
            file=sys.stderr,
        )
        return 1
    for key in keys:
        remove(catalogue, key)
        print(f"{key}: removed")
    return 0


async def _living(settings: Settings, keys: Sequence[BundleKey], staying: Collection[Meaning | None]) -> list[int]:
    """How many clients have a state that each version made last, unless one that stays goes on with it as it is."""
    async with _wire(settings) as wire:
        if wire is None:
            print(
                f"acclimate: no clients were looked for: ACCLIMATE_REDIS_URL names no Redis, and there is no "
                f"{settings.data_dir}",
                file=sys.stderr,
            )
            return [0] * len(keys)
        print("looking for clients ...", file=sys.stderr)
        known = await known_versions(wire, settings.tenant)
        found = []
        for key in keys:
            tenants = settings.tenant, f"{settings.tenant}~{key.name}"
            made = {
                (place.scope, place.in_heads)
                for place in known
                if place.version.identity.bundle == str(key) and _meaning(place.version.identity) not in staying
            }
            found.append(sum([await clients_of_version(wire, tenants, *each) for each in sorted(made)]))
        return found


def _meaning(identity: Identity) -> Meaning:
    return identity.digest, identity.content


def _meaning_in_store(catalogue: Catalogue, key: BundleKey) -> Meaning | None:
    """Of a version that stays; None of one that cannot be read, on which nobody can live."""
    with suppress(BundleError):
        return _meaning(read_identity(catalogue.directory(key), catalogue.manifest(*key)))
    return None


@asynccontextmanager
async def _wire(settings: Settings) -> AsyncIterator[Wire | None]:
    """To the Redis that the settings name, or to that of the data directory, which is started if nobody runs it."""
    if settings.redis_url is None and not settings.data_dir.is_dir():
        yield None
        return
    async with AsyncExitStack() as stack:
        if settings.redis_url is not None:
            wire = Wire(await connected(settings.redis_url))
        else:
            try:
                wire = Wire(await connected(running_at(settings.data_dir)))
            except (EmbeddedRedisError, StateError):
                private = EmbeddedRedis(settings.data_dir, max_bytes=settings.redis_max_bytes)
                wire = Wire(await connected((await stack.enter_async_context(private)).url))
        stack.push_async_callback(wire.aclose)
        yield wire
