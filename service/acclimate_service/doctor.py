"""`acclimate doctor`: looks at what a service here would stand on, as the variables say, and says what to change."""

import argparse
import asyncio
import os
import resource
import statistics
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Final, Literal

import orjson
import torch

from acclimate_adapters import AcclimateError
from acclimate_service.compute.process import available_cores
from acclimate_service.http.middleware import is_loopback
from acclimate_service.keys import Keys, KeysError
from acclimate_service.models import device_of, named, settings_by_model
from acclimate_service.opening import RETRY_WINDOW_MS, connected
from acclimate_service.serving import new_event_loop
from acclimate_service.settings import Settings, SettingsError, read_settings
from acclimate_service.state import (
    EmbeddedRedisError,
    Limits,
    StateError,
    StoreUnfit,
    Wire,
    available_memory,
    check,
    check_windows,
    find_server,
    running_at,
)
from acclimate_store import Catalogue

ERRORS: Final = ()
"""Every failure is a finding."""
_PINGS: Final = 50
_SLOW_S: Final = 0.002
"""Median of an exchange with Redis above which it is most of what a batch waits for; a warm batch takes two."""
_FULL: Final = 0.8
_FILES: Final = 4096
"""Open files below which connections are refused before anything else is scarce."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What was found about one thing.

    Args:
        about: the thing.
        verdict: `fault` of what keeps a service from starting, or lets it lose what it acknowledged.
        found: how it is.
        change: what to change; empty where all is well.
    """

    about: str
    verdict: Literal["fine", "advice", "fault"]
    found: str
    change: str = ""


def run_doctor(options: argparse.Namespace) -> int:
    """Print what was found; 1 if there is a fault."""
    found = diagnose()
    if options.json:
        print(orjson.dumps([asdict(each) for each in found]).decode())
    else:
        for each in found:
            print(
                f"{each.verdict:<8}{each.about:<10}{each.found}" + (f"\n{'':18}-> {each.change}" if each.change else "")
            )
    return int(any(each.verdict == "fault" for each in found))


def diagnose() -> list[Finding]:
    """Look at everything; what cannot be looked at without sound settings is left out."""
    try:
        settings = read_settings()
    except SettingsError as error:
        return [Finding("settings", "fault", str(error), "mend or unset these variables")]
    found = [Finding("settings", "fine", "every ACCLIMATE_* variable is a setting and has a value that it accepts")]
    for about, look in (
        ("store", _store), ("device", _device), ("threads", _threads), ("limits", _limits), ("access", _access)
    ):  # fmt: skip
        found += _looked(about, look, settings)
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        return found + runner.run(_redis(settings))


def _looked(about: str, look: Callable[[Settings], Iterator[Finding]], settings: Settings) -> list[Finding]:
    try:
        return list(look(settings))
    except (SettingsError, AcclimateError) as error:
        return [Finding(about, "fault", str(error), "a service would not start like this")]


def _store(settings: Settings) -> Iterator[Finding]:
    catalogue = Catalogue(settings.model_store, settings.allowed_imports)
    for each in settings_by_model(settings):
        key = catalogue.resolve(*named(each.model, catalogue))
        wrong = catalogue.verify(*key)
        if wrong:
            yield Finding("store", "fault", f"{key}: {'; '.join(wrong)}", "publish it again, or serve another version")
        else:
            yield Finding("store", "fine", f"{key} in {settings.model_store} is whole")


def _device(settings: Settings) -> Iterator[Finding]:
    device = device_of(settings.device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"torch {torch.__version__}"
    yield Finding("device", "fine", f"{settings.device} ({name})")


def _threads(settings: Settings) -> Iterator[Finding]:
    cores = available_cores()
    threads = settings.threads or min(torch.get_num_threads(), cores)
    if threads > cores:
        found = f"{threads} threads of torch on {cores} cores: each waits for the others at every operation"
        yield Finding("threads", "advice", found, f"unset ACCLIMATE_THREADS, or set it to {cores}")
    elif threads < cores and settings.threads is None:
        found = f"torch takes {threads} of {cores} cores, as OMP_NUM_THREADS or the like says"
        yield Finding("threads", "advice", found, "unset OMP_NUM_THREADS, or set ACCLIMATE_THREADS")
    else:
        yield Finding("threads", "fine", f"{threads} threads of torch on {cores} cores")


def _limits(settings: Settings) -> Iterator[Finding]:
    limits = Limits(inline_max=settings.inline_max, state_ttl_ms=settings.state_ttl_s * 1000)
    try:
        check_windows(limits, longest_request_ms=settings.request_timeout_ms, retry_window_ms=RETRY_WINDOW_MS)
    except ValueError as error:
        yield Finding(
            "limits", "fault", str(error), "raise ACCLIMATE_STATE_TTL_S or lower ACCLIMATE_REQUEST_TIMEOUT_MS"
        )
    wanted, there = settings.cache_bytes + settings.max_held_bytes, available_memory()
    if wanted > there // 2:
        found = f"states in memory and bodies may take {_mib(wanted)} of {_mib(there)}, beside the network itself"
        yield Finding("limits", "advice", found, "lower ACCLIMATE_CACHE_BYTES or ACCLIMATE_MAX_HELD_BYTES")
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if 0 <= files < _FILES:
        found = f"{files} open files, of which each connection is one"
        yield Finding("limits", "advice", found, f"raise the limit to {_FILES} or more (ulimit -n)")
    else:
        yield Finding("limits", "fine", f"{_mib(wanted)} of {_mib(there)} for states and bodies; {files} open files")


def _access(settings: Settings) -> Iterator[Finding]:
    if settings.keys_file:
        try:
            Keys(settings.keys_file)
            yield Finding("access", "fine", f"keys of {settings.keys_file}")
        except KeysError as error:
            yield Finding("access", "fault", str(error), "mend ACCLIMATE_KEYS_FILE; `acclimate keys create` makes keys")
    elif not (settings.allow_anonymous or is_loopback(settings.host)):
        found = f"at {settings.host} anybody who reaches this machine could read and change every client"
        yield Finding("access", "fault", found, "name a file of keys in ACCLIMATE_KEYS_FILE, or listen on 127.0.0.1")
    else:
        yield Finding("access", "fine", f"no keys, at {settings.host}")
    if not settings.secret:
        found = "without a secret, what the log and Redis know clients by can be guessed"
        yield Finding("access", "advice", found, "set ACCLIMATE_SECRET, the same on all replicas")


async def _redis(settings: Settings) -> list[Finding]:
    try:
        url = settings.redis_url or running_at(settings.data_dir)
    except EmbeddedRedisError:  # nobody runs it now
        return [_private(settings)]
    try:
        wire = Wire(await connected(url))
    except (StateError, SettingsError) as error:
        return [Finding("redis", "fault", str(error), "start it, or mend ACCLIMATE_REDIS_URL")]
    try:
        return [each async for each in _of_redis(wire)]
    except StateError as error:
        return [Finding("redis", "fault", str(error), "look at its log")]
    finally:
        await wire.aclose()


async def _of_redis(wire: Wire) -> AsyncIterator[Finding]:
    facts = await check(wire, override=True)
    shown = f"version {'.'.join(map(str, facts.version))}, {facts.maxmemory_policy}, durability {facts.durability}"
    try:
        await check(wire)
        yield Finding("redis", "fine", shown)
    except StoreUnfit as error:
        for problem in error.problems:
            found, _, change = problem.partition("; ")
            yield Finding("redis", "fault", found, change)
    if facts.aof_enabled and facts.durability not in ("always", "everysec"):
        found = f"what survives a crash of its host is {facts.durability}"
        yield Finding("redis", "advice", found, "set `appendfsync everysec`, or `always`")
    for server in wire.masters:
        memory = dict(line.partition(b":")[::2] for line in (await wire.read("INFO", "memory", at=server)).splitlines())
        used, most = int(memory.get(b"used_memory", 0)), int(memory.get(b"maxmemory", 0))
        if not most:
            change = "set `maxmemory` below what its host has, so that it refuses writes and is not killed"
            yield Finding("redis", "advice", f"nothing bounds its memory, of which {_mib(used)} are used", change)
        elif used > _FULL * most:
            yield Finding("redis", "advice", f"{used / most:.0%} of its memory are used", "give it more `maxmemory`")
        seconds = []
        for _ in range(_PINGS):
            began = time.perf_counter()
            await wire.read("PING", at=server)
            seconds.append(time.perf_counter() - began)
        median = statistics.median(seconds)
        found = f"an exchange takes {1000 * median:.2f} ms (median of {_PINGS})"
        if median > _SLOW_S:
            yield Finding("redis", "advice", found, "bring it nearer: a batch waits for two or three of them")
        else:
            yield Finding("redis", "fine", found)


def _private(settings: Settings) -> Finding:
    """Of the Redis that the service would start."""
    folder = settings.data_dir
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    if not (folder.is_dir() and os.access(folder, os.W_OK)):
        return Finding("redis", "fault", f"{settings.data_dir} cannot be written", "set ACCLIMATE_DATA_DIR")
    try:
        server = find_server()
    except EmbeddedRedisError as error:
        return Finding("redis", "fault", str(error), "install one, or name yours in ACCLIMATE_REDIS_URL")
    return Finding("redis", "fine", f"a private one would be started, {server}, with its files in {settings.data_dir}")


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:,.0f} MiB"
