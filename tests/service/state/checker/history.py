"""One seeded history: replicas, callers, faults; then quiet, and what Redis holds in the end."""

import asyncio
import itertools
import random
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from checker.faults import Faults
from checker.profile import Profile
from checker.records import Call, Deletion, Ending, Fate, Kind, Op, Read
from checker.replica import PATIENT, Replica
from checker.toy import HEADER, PROBE, Toy, ToyFailure, ToyState, batch_of

from acclimate_service.errors import Problem
from acclimate_service.state import (
    Applied,
    ClientDeleted,
    ClientScope,
    ClientUnknown,
    KeyReused,
    KeyUsedBeforeDelete,
    Limits,
    Looked,
    OutOfOrder,
    Policy,
    Request,
    Session,
    StateError,
    VersionUnknown,
)

MODELS = ("0" * 15 + "a", "0" * 15 + "b")
CONFIG = "config 0"
LIMITS = {
    "inline_max": 1000,
    "full_max": 2000,
    "chunk_bytes": 1500,
    "chunk_gap_ms": 1,
    "lease_ms": 60,
    "steal_after_ms": 25,
    "journal_entries": 8,
    "snapshot_entries": 4,
    "snapshot_idle_ms": 80,
    "keep_every_ms": 5,
    "upload_ttl_ms": 400,
    "state_ttl_ms": 1_200_000,
    "key_ttl_ms": 1_200_000,
    "key_min_ms": 600_000,
    "key_cap": 3,
    "jitter_ms": 4,
}
SIZES: dict[str, Callable[[int], int]] = {
    "small": lambda count: 200,
    "large": lambda count: 4000,
    "growing": lambda count: 200 + 250 * count,
    "shrinking": lambda count: max(HEADER, 2600 - 250 * count),
}
JUMP = 0.45
"""Part of a state's life that passes at once."""
FINAL = (ClientDeleted, ClientUnknown, KeyReused, KeyUsedBeforeDelete, OutOfOrder, VersionUnknown)
"""Refusals that sending the same again does not change."""


class History:
    """Runs one seed against a Redis."""

    def __init__(self, seed: int, profile: Profile, lab: Any) -> None:
        self.seed = seed
        self.profile = profile
        self.client = ClientScope(f"h{seed}-{lab.serial()}")
        self.faults = Faults({**profile.rates})
        self.ops: list[Op] = []
        self.deletions: list[Deletion] = []
        self.crashed_harness: list[str] = []
        self._lab = lab
        self._numbers = itertools.count(1)
        self._rng = random.Random(f"history {seed}")
        self._clock = asyncio.get_running_loop().time
        self._ahead = 0.0  # seconds that have passed without anybody waiting for them
        self._passing = asyncio.Lock()
        self.reads: list[Read] = []
        self._models = MODELS if self._rng.random() < profile.second_model else MODELS[:1]
        self._size = profile.size or self._rng.choice(list(SIZES))
        unequal = self._rng.random() < profile.unequal
        resend = self._rng.choice((0, 1, 2))
        self._budget = 0 if self._rng.random() < profile.tiny_budget else 10**9
        self.replicas = [self._replica(name, unequal, resend) for name in ("one", "two", "three")]
        self._home = self._rng.choice(self.replicas)

    def _replica(self, name: str, unequal: bool, resend: int) -> Replica:
        rng = random.Random(f"{self.seed}/{name}/machine")
        limits, journal = {**LIMITS, **self.profile.limits}, True
        if unequal:
            limits["inline_max"] = self._rng.choice((300, 1000, 5000))
            journal = self._rng.random() < 0.7
        machine = Toy(
            SIZES[self._size],
            fails=lambda: self.faults.active and rng.random() < self.profile.failing_steps,
            refuses=lambda: self.faults.active and rng.random() < self.profile.failing_snapshots,
            pause=lambda: rng.uniform(0, 0.004) if rng.random() < 0.5 else 0.0,
        )
        return Replica(
            name,
            self._lab.pool,
            self.faults,
            str(self.seed),
            self.client,
            machine,
            Limits(**limits),
            Policy(CONFIG, journal=journal, keep=2, timeline=True),
            resend,
            self._lab.mutated(self.profile),
            self._budget,
            lambda: self._clock() + self._ahead,
        )

    async def run(self) -> Ending:
        callers = self._rng.randint(1, 3)
        await asyncio.gather(*(self._caller(number) for number in range(callers)))
        await self._lab.calm.wait()
        await self._quiesce()
        return await self._end()

    async def _caller(self, number: int) -> None:
        rng = random.Random(f"{self.seed}/caller {number}")
        actions = {
            self._predict: 60,
            self._duplicates: 12 * self.profile.duplicates,
            self._other_body: 6,
            self._late_retry: 10,
            self._reset: 6 * self.profile.resets,
            self._rework: 5 * self.profile.reworks,
            self._pause: 3 * self.profile.pauses,
            self._roll_back: 4 * self.profile.rollbacks,
            self._delete: 4 * self.profile.deletes,
            self._evict: 6,
            self._hand_over: 6,
            self._drop: 4 * self.profile.drops,
            self._check: 4 * self.profile.drops,
            self._read: 12 * self.profile.reads,
            self._let_time_pass: 6 * self.profile.jumps,
        }
        for _ in range(rng.randint(4, 9)):
            [action] = rng.choices(list(actions), list(actions.values()))
            await action(rng)

    # What callers do.

    async def _predict(self, rng: random.Random) -> None:
        op = self._new(rng, "predict", rng.randbytes(rng.choice((8, 8, 8, 1500))))
        await self._insist(op, rng, rng.randint(1, 8))

    async def _duplicates(self, rng: random.Random) -> None:
        """At once, or so that the second meets the first half-way."""
        op, spread = self._new(rng, "predict", rng.randbytes(8)), rng.choice((0.0, 0.06))

        async def one() -> None:
            await asyncio.sleep(rng.uniform(0, spread))
            await self._call(op, rng)

        await asyncio.gather(*(one() for _ in range(rng.randint(2, 3))))

    async def _other_body(self, rng: random.Random) -> None:
        predictions = [op for op in self.ops if op.kind == "predict"]
        if not predictions:
            return await self._predict(rng)
        first = rng.choice(predictions)
        other = Op("predict", first.model, rng.randbytes(9), Request(first.request.rid, f"{rng.getrandbits(128):032x}"))
        self.ops.append(other)
        await self._call(other, rng)

    async def _late_retry(self, rng: random.Random) -> None:
        if not self.ops:
            return await self._predict(rng)
        await self._call(rng.choice(self.ops), rng)

    async def _reset(self, rng: random.Random) -> None:
        op = self._new(rng, "reset", rng.choice((b"", f"config {rng.randint(1, 9)}".encode())))
        await self._insist(op, rng, rng.randint(1, 3))

    async def _rework(self, rng: random.Random) -> None:
        await self._insist(self._new(rng, "rework", rng.randbytes(8)), rng, rng.randint(1, 4))

    async def _pause(self, rng: random.Random) -> None:
        """For a while, in which others may send batches."""
        await self._insist(self._new(rng, "pause", b"1"), rng, rng.randint(1, 4))
        await asyncio.sleep(rng.uniform(0, 0.02))
        await self._insist(self._new(rng, "pause", b"0"), rng, rng.randint(1, 4))

    async def _roll_back(self, rng: random.Random) -> None:
        await self._insist(self._new(rng, "rollback", b""), rng, rng.randint(1, 3))

    async def _delete(self, rng: random.Random) -> None:
        model = rng.choice(self._models)
        for _ in range(2):
            start = self._clock()
            task = rng.choice(self.replicas).start(model, lambda session, _: session.delete())
            _, error = await self._outcome(task)
            fate = self._fate(error)
            self.deletions.append(Deletion(start, self._clock(), fate))
            if fate == "acknowledged":
                return

    async def _evict(self, rng: random.Random) -> None:
        await rng.choice(self.replicas).evict(rng.choice(self._models))

    async def _hand_over(self, rng: random.Random) -> None:
        """As if another replica had asked for it, whether one did or not."""
        rng.choice(self.replicas).hand_over(rng.choice(self._models))

    async def _drop(self, rng: random.Random) -> None:
        """Without waiting for anybody's turn, as an announcement does."""
        rng.choice(self.replicas).drop()

    async def _check(self, rng: random.Random) -> None:
        """As after an interruption of the announcements."""
        rng.choice(self.replicas).check()

    async def _read(self, rng: random.Random) -> bool:
        """Without a change. True if the client is there, and was read."""
        model, start = rng.choice(self._models), self._clock()
        task = rng.choice(self.replicas).start(
            model, lambda session, _: session.present(), patience=self._patience(rng)
        )
        present, error = await self._outcome(task)
        self._fate(error)
        if error is None and present.seq:
            read = Read(model, start, self._clock(), present.life, present.seq, present.state)
            self.reads.append(read)
            self.faults.injected["read"] += 1
        return error is None

    async def _let_time_pass(self, rng: random.Random) -> None:
        """Less than half a life after it was read, which must keep it alive; no promise for keys ends by it."""
        if not self._lab.calm.is_set():  # Redis is being killed, and could not be told
            return
        async with self._passing:  # else what one caller read, another lets expire
            for model in self._models:
                task = rng.choice(self.replicas).start(model, lambda session, _: session.present())
                _, error = await self._outcome(task)
                if error is not None:
                    return
            self._ahead += JUMP * LIMITS["state_ttl_ms"] / 1000
            await self._lab.age(self.client, JUMP * LIMITS["state_ttl_ms"])
            self.faults.injected["jump"] += 1

    # How their calls end.

    def _new(self, rng: random.Random, kind: Kind, content: bytes) -> Op:
        rid, fingerprint = f"{rng.getrandbits(128):032x}", f"{rng.getrandbits(128):032x}"
        numbered = kind == "predict" and rng.random() < self.profile.numbered
        request = Request(rid, fingerprint, number=next(self._numbers) if numbered else 0)
        self.ops.append(Op(kind, rng.choice(self._models), content, request))
        return self.ops[-1]

    async def _insist(self, op: Op, rng: random.Random, times: int) -> None:
        for _ in range(times):
            call = await self._call(op, rng)
            if call.fate == "acknowledged" or isinstance(call.error, FINAL):
                return
            await asyncio.sleep(rng.uniform(0, 0.02))

    async def _call(self, op: Op, rng: random.Random) -> Call:
        """On any replica, and now and then for the other model, as while a service moves from one to the next."""
        home = rng.random() < self.profile.affinity
        model = rng.choice(self._models) if rng.random() < self.profile.switches else op.model
        replica = self._home if home else rng.choice(self.replicas)
        return await self._call_on(op, replica, model, self._patience(rng))

    def _patience(self, rng: random.Random) -> float:
        return rng.uniform(0.001, 0.05) if rng.random() < self.profile.impatient else PATIENT

    async def _call_on(self, op: Op, replica: Replica, model: str, patience: float = PATIENT) -> Call:
        start = self._clock()
        applied, error = await self._outcome(replica.start(model, self._work(op, replica), op.request, patience))
        self._lab.acknowledged += error is None
        op.calls.append(Call(model, replica.name, start, self._clock(), self._fate(error), applied, error))
        self.faults.injected["late"] += op.calls[-1].late
        self.faults.injected["paused"] += op.calls[-1].paused
        return op.calls[-1]

    def _work(self, op: Op, replica: Replica) -> Callable[[Session[ToyState], Request], Awaitable[Applied]]:
        match op.kind:
            case "predict":
                return lambda session, request: self.profile.apply(session, request, batch_of(op.content))
            case "rework":
                change = partial(replica.machine.rework, content=op.content)
                return lambda session, request: session.apply(request, change)
            case "pause":
                stop = partial(replica.machine.stop, paused=op.content == b"1")
                return lambda session, request: session.apply(request, stop)
            case "rollback":
                return lambda session, request: session.apply(request, partial(replica.machine.roll_back, session))
            case "reset":
                return partial(self._reset_once, op)

    @staticmethod
    async def _reset_once(op: Op, session: Session[ToyState], request: Request) -> Applied:
        await request.admit()
        return await session.reset(request, op.content.decode())

    async def _outcome(self, task: asyncio.Task[Any]) -> tuple[Any, BaseException | None]:
        await asyncio.wait([task])
        if task.cancelled():
            return None, asyncio.CancelledError()
        error = task.exception()
        return (None, error) if error else (task.result(), None)

    def _fate(self, error: BaseException | None) -> Fate:
        if error is None:
            return "acknowledged"
        if isinstance(error, Problem):
            self.faults.injected["gave up"] += 1
        if isinstance(error, StateError | Problem):
            return "unknown" if error.committed else "refused"
        if isinstance(error, ToyFailure):
            return "refused"
        if not isinstance(error, asyncio.CancelledError):
            self.crashed_harness.append(f"unexpected {error!r}")
        return "unknown"

    # The end.

    async def _quiesce(self) -> None:
        self.faults.active = False
        while self.faults.detached:
            await asyncio.wait(set(self.faults.detached))
        for replica in self.replicas:
            replica.crash()
        while under_way := self.faults.exchanges | self.faults.detached:
            await asyncio.wait(under_way)
        await asyncio.gather(*(replica.idle() for replica in self.replicas))
        await asyncio.sleep(LIMITS["lease_ms"] / 1000)

    async def _end(self) -> Ending:
        """Read what is durable, repeat half of what was acknowledged, and read again."""
        life, problems = await self._lab.inspect(self)
        seen = await self._look()
        acknowledged = [op for op in self.ops if op.applied]
        for op in self._rng.sample(acknowledged, (len(acknowledged) + 1) // 2):
            call = await self._call_on(op, self.replicas[0], op.applied[0].model)
            ended = op.applied[0].life != life
            if call.fate != "acknowledged" and not (ended and isinstance(call.error, KeyUsedBeforeDelete)):
                problems.append(f"an acknowledged request repeated in the end: {call.error!r}")
        if await self._look() != seen:
            problems.append("repeating acknowledged requests changed the state")
        problems += await self._come_and_go()
        for replica in self.replicas:
            replica.crash()
            await replica.idle()
        return Ending(life, seen, problems)

    async def _come_and_go(self) -> list[str]:
        """The client expires, comes back, is deleted, and is forgotten: nothing of any existence of it is left."""
        problems, last, replica = list[str](), Op("predict", self._models[0], b"last", None), self.replicas[0]
        replica.drop()
        await self._lab.age(self.client, 1.1 * LIMITS["state_ttl_ms"])
        request = Request(f"{self._rng.getrandbits(128):032x}", "f" * 32)
        applied = await replica.start(last.model, self._work(last, replica), request)
        if applied.seq != 1:
            problems.append(f"the state of an expired client went on at version {applied.seq}")
        await replica.start(last.model, lambda session, _: session.delete())
        problems += await self._lab.left(self.client, {"r", "i", "x"})
        await self._lab.age(self.client, 4 * LIMITS["key_ttl_ms"], everything=True)
        return problems + await self._lab.left(self.client, set())

    async def _look(self) -> dict[str, Looked]:
        seen = {}
        for model in self._models:
            seen[model] = await self.replicas[0].start(model, lambda session, _: session.look(batch_of(PROBE)))
        return {model: Looked(look.seq, look.answer, "restored") for model, look in seen.items()}
