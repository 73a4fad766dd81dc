"""A replica from its first line to its last: it takes the port, opens the service, announces it and answers."""

import asyncio
import gc
import os
import signal
import socket
import threading
from collections.abc import Callable
from typing import TypeAlias

import uvicorn
from fastapi import FastAPI

from acclimate_service.compute.adapters import summary
from acclimate_service.compute.process import keep_freed_memory
from acclimate_service.compute.worker import THREAD
from acclimate_service.http.app import create_app
from acclimate_service.http.middleware import is_loopback
from acclimate_service.http.protocol import Http1
from acclimate_service.http.server import DrainingServer
from acclimate_service.replica import Replica, open_replica
from acclimate_service.served import Served
from acclimate_service.service import Service
from acclimate_service.settings import Settings, SettingsError

Extend: TypeAlias = Callable[[FastAPI, Replica], None]
KEEP_ALIVE_S = 75
"""Longer than load balancers keep idle connections, so that they never send into one that is just being closed."""
_NO_SECRET = (
    "acclimate: ACCLIMATE_SECRET is empty; who reads the Redis and can guess a request, or the id of a client, "
    "finds them by their hashes"
)
BACKLOG = 2048
"""Connections that may wait to be accepted."""


def new_event_loop() -> asyncio.AbstractEventLoop:
    """That of uvloop, which is faster, where it is installed."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


def serve(settings: Settings, extend: Extend = lambda app, replica: None) -> None:
    """Answer until a signal ends it.

    Args:
        settings: of the replica.
        extend: adds to the application, once the service is open.

    Raises:
        SystemExit: a signal came before the service was open.
        SettingsError: they contradict each other, or this machine.
        BundleError, StateError, EmbeddedRedisError: as `open_replica`.
    """
    keep_freed_memory()
    before = set(threading.enumerate())
    try:
        with asyncio.Runner(loop_factory=new_event_loop) as runner:
            runner.run(_serve(settings, extend))
    except asyncio.CancelledError:
        raise SystemExit(128 + signal.SIGTERM) from None
    finally:
        left = set(threading.enumerate()) - before
        if any(thread.name.startswith(THREAD) for thread in left):  # everything else is closed
            os._exit(os.EX_SOFTWARE)  # Python would wait for it


async def _serve(settings: Settings, extend: Extend) -> None:
    """Answer until a signal ends it. One that comes before the service is open breaks that off.

    Raises:
        CancelledError: it was broken off.
    """
    opening, loop = asyncio.current_task(), asyncio.get_running_loop()
    assert opening is not None
    loop.add_signal_handler(signal.SIGTERM, opening.cancel)
    _require_keys(settings)
    with _bind(settings.host, settings.port) as listener:
        async with open_replica(settings) as replica:
            app = create_app(replica)
            extend(app, replica)
            config = uvicorn.Config(
                app,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=settings.grace_s,
                log_config=None,  # its lines are written as all others are
                log_level="warning",
                http=Http1,
                ws="none",
            )
            gc.freeze()  # what was loaded stays: no collection need walk over it and hold up the requests
            server = DrainingServer(config, replica, settings.lead_s)
            loop.remove_signal_handler(signal.SIGTERM)
            server.heed_signals()
            listener.listen(BACKLOG)
            print(_announcement(replica, listener))
            for served in replica.models.values():
                for each in served.versions.values():
                    print("\n".join(_offer(each)), flush=True)
                if (told := _rolled_out(served)) is not None:
                    print(told, flush=True)
            if not settings.secret:
                print(_NO_SECRET, flush=True)
            await server.serve(sockets=[listener])


def _require_keys(settings: Settings) -> None:
    """Refuse to let in whoever reaches the machine; raises SettingsError."""
    if settings.keys_file and settings.allow_anonymous:
        raise SettingsError("ACCLIMATE_ALLOW_ANONYMOUS: with ACCLIMATE_KEYS_FILE nobody is let in without a key")
    if not (settings.keys_file or settings.allow_anonymous or is_loopback(settings.host)):
        raise SettingsError(
            f"ACCLIMATE_HOST: at {settings.host} anybody who reaches this machine could read and change every client; "
            "make keys with `acclimate keys create` and name their file in ACCLIMATE_KEYS_FILE, or set "
            "ACCLIMATE_ALLOW_ANONYMOUS=true if nobody reaches it who should not"
        )


def _bind(host: str, port: int) -> socket.socket:
    """Take the port before anything else is done; nobody is let in until the service can answer.

    Raises:
        SettingsError: the address is not ours, or the port is taken.
    """
    listener = None
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        if listener is not None:
            listener.close()
        reason = error.strerror or error
        raise SettingsError(f"ACCLIMATE_HOST, ACCLIMATE_PORT: cannot listen at {host}:{port}: {reason}") from error
    return listener


def _announcement(replica: Replica, listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    every = [service for served in replica.models.values() for service in served.versions.values()]
    served = ", ".join(each.bundle.manifest.key for each in every)
    where = "the Redis at ACCLIMATE_REDIS_URL" if replica.settings.redis_url else f"{replica.settings.data_dir}"
    return (
        f"acclimate: serving {served} at http://{f'[{host}]' if ':' in host else host}:{port}, "
        f"state in {where} (durability {replica.service.probe.facts.durability})"
    )


def _offer(service: Service) -> tuple[str, ...]:
    """What a model is served with."""
    offered = f"acclimate: {summary(service.bundle.model, service.settings.adapters, service.configurations.settings)}"
    return offered, _default_adapter(service), _computing(service), *_elsewhere(service)


def _rolled_out(served: Served) -> str | None:
    """Who is answered by what, where that was said at run time; the settings and the store are not asked then."""
    now = served.applied
    if not now.number:
        return None
    shares = ", ".join(f"{version} answers {100 * now.share_of(version):g} % of the clients" for version in now.loaded)
    return f"acclimate: {served.name} as it was rolled out: {shares}; `acclimate models promote` changes it"


def _default_adapter(service: Service) -> str:
    if service.settings.adapter is not None:
        return f"acclimate: default adapter: {service.settings.adapter}, as ACCLIMATE_ADAPTER says"
    return f"acclimate: {service.bundle.default(service.settings.adapters)}"


def _elsewhere(service: Service) -> tuple[str, ...]:
    """Whose states nobody goes on with."""
    if not service.elsewhere and service.counted:
        return ()
    found = ", ".join(f"{clients} of {bundle}" for bundle, clients in service.elsewhere.items()) or "none"
    told = "states of other models" if service.counted else "states of other models, as far as they were counted"
    return (f"acclimate: {told}: {found}; clients that come to {service.bundle.manifest.key} with one begin anew",)


def _computing(service: Service) -> str:
    bundle = service.bundle
    return (
        f"acclimate: {bundle.runtime} on {bundle.model.device.type} computes what needs no gradient; "
        f"memory layout of torch's passes: {bundle.layout}"
    )
