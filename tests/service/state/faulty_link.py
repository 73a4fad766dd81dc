"""A link to Redis that fails on command."""

import asyncio
import contextlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal


@dataclass
class Fault:
    """What happens to the next command that holds `needle`; `caught` is set when it came by."""

    kind: Literal["lose reply", "hold", "stall"]
    needle: bytes
    caught: asyncio.Event = field(default_factory=asyncio.Event)
    released: asyncio.Event = field(default_factory=asyncio.Event)
    landed: asyncio.Event = field(default_factory=asyncio.Event)


class Link:
    """A unix socket in front of Redis. Faults:

    - `lose reply`: the command lands, the caller's connection breaks.
    - `hold`: the caller's connection breaks, the command lands once released.
    - `stall`: the command waits until released, then all goes on as if nothing had happened.
    """

    def __init__(self, upstream: str, path: Path) -> None:
        self._upstream = upstream
        self._path = path
        self._faults: list[Fault] = []
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        return f"unix://{self._path}"

    def fault(self, kind: Literal["lose reply", "hold", "stall"], needle: str) -> Fault:
        self._faults.append(Fault(kind, needle.encode()))
        return self._faults[-1]

    async def __aenter__(self) -> "Link":
        self._server = await asyncio.start_unix_server(self._accept, self._path)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._serve(reader, writer))
        self._tasks.add(task)
        with contextlib.suppress(OSError, asyncio.CancelledError):
            await task

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        replies, commands = await asyncio.open_unix_connection(self._upstream)
        relay = asyncio.create_task(self._relay(replies, writer))
        try:
            while data := await reader.read(1 << 20):
                fault = next((each for each in self._faults if each.needle in data), None)
                if fault is None:
                    commands.write(data)
                elif await self._strike(fault, data, relay, replies, commands, writer):
                    return
        finally:
            commands.close()
            writer.close()
            relay.cancel()
            await asyncio.gather(relay, return_exceptions=True)

    async def _strike(
        self,
        fault: Fault,
        data: bytes,
        relay: asyncio.Task[None],
        replies: asyncio.StreamReader,
        commands: asyncio.StreamWriter,
        writer: asyncio.StreamWriter,
    ) -> bool:
        """Act on a command; True if the connection is over."""
        self._faults.remove(fault)
        fault.caught.set()
        if fault.kind == "stall":
            await fault.released.wait()
            commands.write(data)
            return False
        relay.cancel()
        await asyncio.gather(relay, return_exceptions=True)
        if fault.kind == "hold":
            writer.close()
            await fault.released.wait()
        commands.write(data)
        await replies.read(1)
        fault.landed.set()
        return True

    @staticmethod
    async def _relay(replies: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await replies.read(1 << 20):
            writer.write(data)
