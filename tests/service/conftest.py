"""Real services in this process: uvicorn in a thread, a real Redis, the bundled model, the SDK and plain HTTP."""

import asyncio
import socket
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, AsyncExitStack, ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import httpx
import numpy as np
import pytest
import torch
import uvicorn
import uvloop
from numpy.typing import NDArray
from redis import Redis
from safetensors.torch import load_file
from torch import Tensor

from acclimate_adapters import ADAPTERS, Anchors, FrozenModel, State, Step, create, guarded_step
from acclimate_client import Client
from acclimate_client._transport import certificates
from acclimate_service import models
from acclimate_service.clients.sessions import Sessions
from acclimate_service.compute.costs import Prices
from acclimate_service.http.app import create_app
from acclimate_service.http.protocol import Http1
from acclimate_service.replica import Replica as Process
from acclimate_service.replica import open_replica
from acclimate_service.service import Service
from acclimate_service.settings import Settings
from acclimate_service.state.redis.embedded import EmbeddedRedis
from acclimate_store import Bundle, Catalogue, write_bundle
from acclimate_store.architectures import build
from acclimate_store.files import MODEL_FILE
from acclimate_store.samples import load_streams

sys.path.insert(0, str(Path(__file__).parent))  # `described`
from described import DESCRIBED

ROOT = Path(__file__).parents[2]
BUNDLES = ROOT / "model_store" / "bundles"
PROBLEM_FIELDS = {"type", "title", "status", "detail", "code", "retryable", "state_committed", "request_id", "error"}
EXACT = 1.0
"""Budget of stored states: answers are compared with those of uninterrupted runs, digit by digit."""
Images = NDArray[np.uint8]
T = TypeVar("T")


class Gate:
    """Holds up the steps of the adapter `gated` while it is shut."""

    def __init__(self) -> None:
        self.shut = False
        self._entered = threading.Semaphore(0)
        self._passes = threading.Semaphore(0)

    def hold(self) -> None:
        if self.shut:
            self._entered.release()
            assert self._passes.acquire(timeout=20), "nobody opened the gate"

    def wait_for_a_step(self) -> None:
        assert self._entered.acquire(timeout=20), "no step came to the gate"

    def open(self) -> None:
        """Let the step at the gate go on, and all that come later."""
        self.shut = False
        self._passes.release()


GATE = Gate()


@dataclass(frozen=True, slots=True)
class Gated:
    """Answers like the frozen model, remembers the first pixel of every batch, and waits at the gate."""

    name: ClassVar[str] = "gated"
    layout: ClassVar[int] = 1
    needs: ClassVar[frozenset[str]] = frozenset()

    def init(self, model: FrozenModel) -> State:
        return State(self.name, self.layout, model.content_hash, tensors={"seen": torch.empty(0)})

    def step(self, model: FrozenModel, state: State, x: Tensor) -> Step:
        GATE.hold()
        seen = torch.cat((state.tensors["seen"], x[:1, 0, 0, 0]))
        frozen = model.frozen(model.batch(x))
        return Step(frozen.logits, state.next({"seen": seen}), {"seen": tuple(seen.tolist())}, frozen.logits)


@dataclass(frozen=True, slots=True)
class Failing:
    """Fails on a batch that begins with a white pixel."""

    name: ClassVar[str] = "failing"
    layout: ClassVar[int] = 1
    needs: ClassVar[frozenset[str]] = frozenset()

    def init(self, model: FrozenModel) -> State:
        return State(self.name, self.layout, model.content_hash)

    def step(self, model: FrozenModel, state: State, x: Tensor) -> Step:
        if x[0, 0, 0, 0] > 1:
            raise ZeroDivisionError("a defect of this adapter")
        return Step(model.frozen(model.batch(x)).logits, state.next())


@dataclass(frozen=True, slots=True)
class Contrary:
    """Says the class after the one that the frozen model sees."""

    name: ClassVar[str] = "contrary"
    layout: ClassVar[int] = 1
    needs: ClassVar[frozenset[str]] = frozenset()

    def init(self, model: FrozenModel) -> State:
        return State(self.name, self.layout, model.content_hash)

    def step(self, model: FrozenModel, state: State, x: Tensor) -> Step:
        frozen = model.frozen(model.batch(x)).logits
        return Step(frozen.roll(1, dims=-1), state.next(), {"entropy": 0.0}, frozen)


@dataclass(frozen=True)
class Replica:
    """A running service."""

    url: str
    process: Process
    redis: "Redis"
    http: httpx.Client
    loop: asyncio.AbstractEventLoop

    @property
    def service(self) -> Service:
        """That of the default version of the default model."""
        return self.process.service

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run work on the event loop of the service."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(timeout=60)

    def sdk(self, **options: Any) -> Client:
        return Client(self.url, **{"max_retries": 0, **options})

    def keys(self, client: str) -> dict[bytes, Any]:
        """Every Redis key of a client and what is there, once nothing follows in the background.

        Leases are left out: they end by themselves after seconds.
        """
        before: dict[bytes, Any] | None = None
        while (found := self._keys(client)) != before:
            before = found
            time.sleep(0.03)
        return found

    def _keys(self, client: str) -> dict[bytes, Any]:
        found = self.redis.keys(f"acc:{{default/{client}}}:*")
        read: dict[bytes, Callable[[bytes], Any]] = {
            b"hash": self.redis.hgetall,
            b"list": lambda key: self.redis.lrange(key, 0, -1),
            b"string": self.redis.get,
            b"zset": lambda key: self.redis.zrange(key, 0, -1, withscores=True),
        }
        kinds = {key: self.redis.type(key) for key in found if not key.endswith(b":l")}
        return {key: read[kind](key) for key, kind in kinds.items() if kind != b"none"}  # which is gone by now

    @contextmanager
    def at_work(self, client: str, *kept: Sessions) -> Iterator[None]:
        """Hold the turn of a client in these sessions until the end of the block."""
        turns = AsyncExitStack()
        for sessions in kept:
            self.run(turns.enter_async_context(sessions._turns.hold(client)))
        try:
            yield
        finally:
            self.run(turns.aclose())

    def metric(self, line: str) -> float:
        """Value of a metric, by its name and labels as they are printed; 0 if it is not."""
        lines = self.http.get("/metrics").text.splitlines()
        return next((float(text.split()[-1]) for text in lines if text.rpartition(" ")[0] == line), 0.0)

    def await_waiting(self, number: float) -> None:
        """Wait until so many batches are under way."""
        deadline = time.monotonic() + 10
        while self.metric("acclimate_waiting") != number:
            assert time.monotonic() < deadline, f"{self.metric('acclimate_waiting')} batches under way, not {number}"
            time.sleep(0.01)


@dataclass(frozen=True)
class Serial:
    """What an uninterrupted run in process answers."""

    bundle: Bundle

    def probabilities(self, adapter: str, batches: list[Images], **options: Any) -> list[NDArray[np.float64]]:
        method = create(adapter, **options)
        state, answers = method.init(self.bundle.model), []
        for images in batches:
            step = guarded_step(method, self.bundle.model, state, self.bundle.prepare(images))
            state = step.state
            answers.append(step.logits.double().softmax(dim=-1).numpy())
        return answers


@contextmanager
def running(settings: Settings) -> Iterator[Replica]:
    """A service in a thread of its own, on a Redis of its own unless the settings name one."""
    ready: Future[tuple[uvicorn.Server, Replica]] = Future()
    listener = socket.create_server(("127.0.0.1", 0))

    async def serve() -> None:
        async with AsyncExitStack() as stack:
            url = settings.redis_url
            if url is None:
                url = (await stack.enter_async_context(EmbeddedRedis(settings.data_dir))).url
            opened = await stack.enter_async_context(open_replica(settings.model_copy(update={"redis_url": url})))
            config = uvicorn.Config(create_app(opened), http=Http1, log_level="critical", ws="none")
            server = uvicorn.Server(config)
            address = f"http://127.0.0.1:{listener.getsockname()[1]}"
            redis = stack.enter_context(Redis.from_url(url))
            hooks = {"response": [DESCRIBED.check]}
            http = stack.enter_context(
                httpx.Client(base_url=address, timeout=30, verify=certificates(), event_hooks=hooks)
            )
            ready.set_result((server, Replica(address, opened, redis, http, asyncio.get_running_loop())))
            await server.serve(sockets=[listener])

    def run() -> None:
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(serve())
        except BaseException as error:
            if ready.done():
                raise
            ready.set_exception(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        server, replica = ready.result(timeout=60)
        yield replica
        replica.process.draining = True  # as when it is told to end: streams end
        server.should_exit = True
    finally:
        thread.join(timeout=30)
        listener.close()
    assert not thread.is_alive()


@pytest.fixture(scope="session", autouse=True)
def _shipped_bundles_are_loaded_once() -> Iterator[None]:
    """Read, lay out and price a bundle of the repository once for all services of this process, which never change it.

    Those that a test makes or changes are loaded as ever.
    """
    load, measured = models._load_bundle, Prices.measured
    loaded: dict[tuple[Any, ...], Bundle] = {}
    priced: dict[int, Prices] = {}

    def load_once(settings: Settings) -> Bundle:
        if settings.model_store != BUNDLES:
            return load(settings)
        key = (settings.model, settings.device, settings.runtime, settings.strict_replay, settings.threads)
        return loaded[key] if key in loaded else loaded.setdefault(key, load(settings))

    def price_once(bundle: Bundle) -> Prices:
        if not any(bundle is each for each in loaded.values()):
            return measured(bundle)
        return priced[id(bundle)] if id(bundle) in priced else priced.setdefault(id(bundle), measured(bundle))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(models, "_load_bundle", load_once)
        patch.setattr(Prices, "measured", price_once)
        yield


@pytest.fixture
def contrary(monkeypatch: pytest.MonkeyPatch) -> None:
    """An adapter `contrary`, which is always wrong where the frozen model is right."""
    monkeypatch.setitem(ADAPTERS, "contrary", Contrary)


@pytest.fixture
def make_replica(
    integration: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Replica]]:
    """Start a service with settings of its own."""
    monkeypatch.setitem(ADAPTERS, "gated", Gated)
    monkeypatch.setitem(ADAPTERS, "failing", Failing)
    numbers = count()
    with ExitStack() as stack:
        stack.callback(GATE.open)

        def make(**settings: Any) -> Replica:
            data_dir = tmp_path / str(next(numbers))
            defaults = {"data_dir": data_dir, "model_store": BUNDLES, "threads": 1, "state_budget": EXACT}
            return stack.enter_context(running(Settings(**{**defaults, **settings})))

        yield make


@pytest.fixture(scope="session")
def replica(integration: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replica]:
    """A service that many tests share, each with clients of its own."""
    data_dir = tmp_path_factory.mktemp("shared")
    settings = Settings(data_dir=data_dir, model_store=BUNDLES, threads=1, state_budget=EXACT)
    with running(settings) as shared:
        yield shared


@pytest.fixture(scope="session")
def run_service(integration: None) -> Callable[..., AbstractContextManager[Replica]]:
    """Run a service with these settings for a block."""
    defaults = {"model_store": BUNDLES, "threads": 1, "state_budget": EXACT}
    return lambda **settings: running(Settings(**{**defaults, **settings}))


@pytest.fixture(scope="session")
def wait_until() -> Callable[[Callable[[], Any]], None]:
    """Wait until a condition holds."""

    def wait(condition: Callable[[], Any]) -> None:
        deadline = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < deadline, "not within 60 s"
            time.sleep(0.01)

    return wait


@pytest.fixture
def gate() -> Gate:
    """Shut: the next step of `gated` waits."""
    GATE.__init__()
    GATE.shut = True
    return GATE


@pytest.fixture(scope="session")
def serial() -> Serial:
    return Serial(Catalogue(BUNDLES).load("fashion-cnn"))


@pytest.fixture(scope="session")
def anchored_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with the bundled model, which also carries labelled anchors here: it can be served with every adapter."""
    bundle = Catalogue(BUNDLES).load("fashion-cnn")
    net = build(bundle.manifest.architecture, bundle.manifest.architecture_options)
    net.load_state_dict(load_file(BUNDLES / bundle.manifest.key / MODEL_FILE))
    (client, *_) = load_streams(ROOT / "model_store" / "samples" / "fashion-hybrid" / "streams.npz")
    anchors = Anchors(bundle.prepare(client.images[:60]), torch.from_numpy(client.labels[:60].astype(np.int64)))
    store = tmp_path_factory.mktemp("anchored")
    write_bundle(store, bundle.manifest, net, replace(bundle.model.source, anchors=anchors))
    return store


@pytest.fixture(scope="session")
def anchored(anchored_store: Path) -> Serial:
    return Serial(Catalogue(anchored_store).load("fashion-cnn"))


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    """Threads for requests that wait."""
    with ThreadPoolExecutor(16) as threads:
        yield threads


@pytest.fixture(scope="session")
def post() -> Callable[..., httpx.Response]:
    """Send a raw uint8 batch."""

    def send(replica: Replica, client: str, images: Images, query: str = "", **headers: str) -> httpx.Response:
        shape = ",".join(map(str, images.shape))
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return replica.http.post(
            f"/clients/{client}/predict{query}",
            content=images.tobytes(),
            headers={"Content-Type": "application/octet-stream", "X-Tensor-Shape": shape, **named},
        )

    return send


@pytest.fixture(scope="session")
def assert_problem() -> Callable[..., Mapping[str, Any]]:
    """Check that a reply is a complete problem document, and return it."""

    def check(reply: httpx.Response, status: int, code: str, committed: bool | str = False) -> Mapping[str, Any]:
        assert (reply.status_code, reply.headers["content-type"]) == (status, "application/problem+json"), reply.text
        body: dict[str, Any] = reply.json()
        assert set(body) == PROBLEM_FIELDS
        assert (body["code"], body["status"], body["state_committed"]) == (code, status, committed), body
        assert body["detail"]
        assert body["error"] == body["detail"]
        assert isinstance(body["retryable"], bool)
        assert body["request_id"] == reply.headers["x-request-id"]
        return body

    return check
