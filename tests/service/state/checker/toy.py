"""A machine whose states are hashes: any lost, doubled or swapped batch changes every later state and answer."""

import asyncio
import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace

from acclimate_service.state import Batch, Change, Point, Present, Session, Start

PROBE = b"probe"
HEADER = 40  # bytes: digest and count
LARGE = 1000


class ToyFailure(Exception):
    """The step failed, as a step may on one machine and not on another."""


@dataclass(frozen=True)
class ToyState:
    digest: bytes
    count: int
    config: str

    @property
    def point(self) -> bytes:
        measured = {"digest": int.from_bytes(self.digest[:2])}
        return Point(batches=1, rows=1, measured=measured).encode() if self.count else b""

    @property
    def beside(self) -> int:
        return 0


def initial(config: str) -> ToyState:
    return ToyState(hashlib.sha256(config.encode()).digest(), 0, config)


def advance(state: ToyState, payload: bytes, skipped: int = 0) -> ToyState:
    missing = b"skipped %d" % skipped if skipped else b""
    return ToyState(hashlib.sha256(state.digest + payload + missing).digest(), state.count + 1, state.config)


def rework(state: ToyState, content: bytes) -> ToyState:
    """Another state in the place of this one, under another configuration; both depend on what was before."""
    config = "config " + hashlib.sha256(state.config.encode() + content).hexdigest()[:8]
    return ToyState(hashlib.sha256(b"rework" + state.digest + content).digest(), state.count, config)


def answer_of(state: ToyState) -> bytes:
    return hashlib.sha256(b"answer" + state.digest).digest()


def answer_after(*payloads: bytes, config: str = "{}") -> bytes:
    """The answer to the last of these batches, from the beginning."""
    state = initial(config)
    for payload in payloads:
        state = advance(state, payload)
    return answer_of(state)


def batch_of(payload: bytes) -> Batch:
    return Batch("uint8", (len(payload),), payload)


class Toy:
    """The machine of the tests.

    Args:
        size_at: bytes of a state after so many batches.
        fails: asked once per step, after it began.
        refuses: asked once per serialisation.
        pause: awaited in each step, once it began.
    """

    engine = "toy 1"

    def __init__(
        self,
        size_at: Callable[[int], int] = lambda count: HEADER,
        fails: Callable[[], bool] = lambda: False,
        refuses: Callable[[], bool] = lambda: False,
        pause: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self._size_at = size_at
        self.fails = fails
        self.refuses = refuses
        self.pause = pause
        self.steps = 0

    async def initial(self, config: str) -> ToyState:
        return initial(config)

    async def step(self, state: ToyState, batch: Batch, start: Start) -> tuple[ToyState, bytes]:
        await start()
        self.steps += 1
        await asyncio.sleep(self.pause())
        if self.fails():
            raise ToyFailure
        following = advance(state, bytes(batch.data), batch.skipped)
        return following, answer_of(following)

    async def rework(self, present: Present[ToyState], content: bytes) -> Change[ToyState]:
        await asyncio.sleep(self.pause())
        if self.fails():
            raise ToyFailure
        state = rework(replace(present.state, config=present.config), content)
        return Change(state.config, state, answer_of(state))

    async def stop(self, present: Present[ToyState], paused: bool) -> Change[ToyState]:
        """The same state, whose batches are not folded in from now on, or are again."""
        return Change(present.config, present.state, answer_of(present.state), paused)

    async def roll_back(self, session: Session[ToyState], present: Present[ToyState]) -> Change[ToyState]:
        """The newest state that is kept; the answer says of which version."""
        earlier = await session.earlier()
        answer = b"%d " % earlier.seq + answer_of(earlier.state)
        return Change(earlier.config, earlier.state, answer, back=earlier.seq)

    async def serialise(self, state: ToyState, *, awaited: bool = True) -> bytes:
        if self.refuses():
            raise ToyFailure
        return (state.digest + state.count.to_bytes(8, "big")).ljust(self.size(state), b"\0")

    async def deserialise(self, config: str, data: bytes) -> ToyState:
        return ToyState(data[:32], int.from_bytes(data[32:HEADER], "big"), config)

    def size(self, state: ToyState) -> int:
        return max(HEADER, self._size_at(state.count))

    def adapter(self, state: ToyState) -> str:
        return "toy"


def failing_once(size: int = LARGE) -> Toy:
    """A machine whose first step fails."""
    machine, left = Toy(lambda count: size), [True]
    machine.fails = lambda: bool(left and left.pop())
    return machine
