"""Judges a history: is there one order of its operations that explains all that was said, and all that is stored?"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise, permutations

from checker.history import CONFIG, History
from checker.records import Ending, Op
from checker.toy import PROBE, ToyState, advance, answer_of, initial, rework


@dataclass(frozen=True)
class Scope:
    """One life of the client in one model scope: what was acknowledged at which version, up to the last one known."""

    life: str
    model: str
    placed: dict[int, Op]
    length: int
    probe: bytes | None  # what the durable state answers; None where it is gone
    reads: dict[int, set[bytes]]  # digests of the states that readers were shown


@dataclass(frozen=True)
class Point:
    """Where a life has come to: its state, the number of the newest numbered batch, whether it is paused, and all
    states before, from the initial one on."""

    state: ToyState
    number: int = 0
    paused: bool = False
    before: tuple[ToyState, ...] = ()

    def after(self, op: Op) -> "list[Point]":
        """Where this operation may lead: nowhere if it comes too late, or while the client is paused."""
        match op.kind:
            case "reset":
                return [self._at(initial(op.content.decode() or self.state.config))]
            case "rework":
                return [self._at(rework(self.state, op.content))]
            case "pause":
                return [replace(self._at(self.state), paused=op.content == b"1")]
            case "rollback":
                return [self._at(state) for state in self.before[1:]]
        if self.paused or 0 < op.number <= self.number:
            return []
        skipped = max(0, op.number - self.number - 1) if self.number else 0
        return [replace(self._at(advance(self.state, op.content, skipped)), number=op.number or self.number)]

    def answers(self, op: Op) -> set[bytes]:
        """What may be said of an operation that led here."""
        answer = answer_of(self.state)
        if op.kind != "rollback":
            return {answer}
        return {b"%d " % seq + answer for seq, state in enumerate(self.before) if state == self.state}

    def _at(self, state: ToyState) -> "Point":
        return replace(self, state=state, before=(*self.before, self.state))


def judge(history: History, ending: Ending) -> list[str]:
    """Everything that is wrong, in words; empty if nothing is."""
    problems = [*history.crashed_harness, *ending.problems]
    problems += _one_answer_per_key(history)
    problems += _silence_of_the_deleted(history)
    problems += _reads_in_time(history)
    problems += _answers_to_be_had(history)
    problems += _rightly_late(history)
    problems += _rightly_paused(history)
    scopes, misplaced = _scopes(history, ending)
    problems += misplaced
    problems += [problem for scope in scopes for problem in _real_time(scope)]
    problems += [problem for scope in scopes for problem in _numbers_rise(scope)]
    dead = {scope.life for scope in scopes} - {ending.life}
    if len(dead) > sum(deletion.fate != "refused" for deletion in history.deletions):
        problems.append("a life ended that nobody deleted")
    if not problems and not _explained(history, scopes):
        problems.append("no order of the operations explains the answers and the final state")
    return problems


def _one_answer_per_key(history: History) -> Iterator[str]:
    """I2, I5."""
    said = defaultdict(set)
    for op in history.ops:
        for applied in op.applied:
            said[op.request.rid].add((id(op), applied.life, applied.model, applied.seq))
        if len({applied.answer for applied in op.applied} - {None}) > 1:
            yield f"{_name(history, op)} got two answers"
    for places in said.values():
        if len(places) > 1:
            yield f"one key was applied as {sorted(place[1:] for place in places)}"


def _answers_to_be_had(history: History) -> Iterator[str]:
    """An answer may be gone only if a reset dropped the journal it could be computed from."""
    resets = [op for op in history.ops if op.kind == "reset" and op.calls]
    for op in history.ops:
        for call in op.calls:
            if op.kind == "reset" or not call.applied or call.applied.answer is not None:
                continue
            if call.model == call.applied.model and not any(reset.start < call.end for reset in resets):
                yield f"the answer of {_name(history, op)} is gone"


def _silence_of_the_deleted(history: History) -> Iterator[str]:
    lives = defaultdict(list)
    for op in history.ops:
        for call in op.calls:
            if call.applied:
                lives[call.applied.life].append(call)
    for deletion in history.deletions:
        for life, calls in lives.items():
            before = any(call.end < deletion.start for call in calls)
            if deletion.fate == "acknowledged" and before and any(call.start > deletion.end for call in calls):
                yield f"life {life} spoke after it was deleted"


def _scopes(history: History, ending: Ending) -> tuple[list[Scope], list[str]]:
    placed: dict[tuple[str, str], dict[int, Op]] = defaultdict(dict)
    problems = []
    for op in history.ops:
        for applied in op.applied[:1]:
            other = placed[applied.life, applied.model].setdefault(applied.seq, op)
            if other is not op:
                problems.append(f"{_name(history, op)} and {_name(history, other)} are both version {applied.seq}")
    for model in ending.seen:
        if ending.life:
            placed[ending.life, model] = placed[ending.life, model]
    reads: dict[tuple[str, str], dict[int, set[bytes]]] = defaultdict(lambda: defaultdict(set))
    for read in history.reads:
        reads[read.life, read.model][read.seq].add(read.state.digest)
        placed[read.life, read.model] = placed[read.life, read.model]
    scopes = []
    for (life, model), ops in placed.items():
        last, shown = max(ops, default=0), reads[life, model]
        if life != ending.life:
            scopes.append(Scope(life, model, ops, last, None, shown))
            continue
        scopes.append(Scope(life, model, ops, ending.seen[model].seq, ending.seen[model].answer, shown))
        if last > ending.seen[model].seq:
            problems.append(f"version {last} was acknowledged, version {ending.seen[model].seq} is stored")
    return scopes, problems


def _real_time(scope: Scope) -> Iterator[str]:
    for (seq, op), (other_seq, other) in permutations(scope.placed.items(), 2):
        if op.acknowledged < other.start and seq > other_seq:
            yield f"version {other_seq} was asked for after version {seq} had been answered"


def _numbers_rise(scope: Scope) -> Iterator[str]:
    numbered = [op.number for _, op in sorted(scope.placed.items()) if op.number]
    for number, following in pairwise(numbered):
        if number >= following:
            yield f"batch {following} was applied after batch {number}"


def _reads_in_time(history: History) -> Iterator[str]:
    """A reader sees what was acknowledged before it asked."""
    for read in history.reads:
        for op in history.ops:
            for applied in op.applied[:1]:
                same = (applied.life, applied.model) == (read.life, read.model)
                if same and op.acknowledged < read.start and applied.seq > read.seq:
                    yield f"version {read.seq} was shown after version {applied.seq} had been acknowledged"


def _rightly_late(history: History) -> Iterator[str]:
    """Who is told to come too late was not applied before, and somebody with such a number came."""
    for op in history.ops:
        for call in op.calls:
            if not call.late:
                continue
            if any(earlier.applied and earlier.end <= call.start for earlier in op.calls):
                yield f"{_name(history, op)} was applied, and then called late"
            others = [other for other in history.ops if other is not op and other.number >= op.number and other.calls]
            if not any(other.start < call.end and call.model in {c.model for c in other.calls} for other in others):
                yield f"{_name(history, op)} was called late, but nothing came before it"


def _rightly_paused(history: History) -> Iterator[str]:
    """Who is turned away from a paused client was not applied before, and somebody had asked for the pause."""
    for op in history.ops:
        for call in op.calls:
            if not call.paused:
                continue
            if any(earlier.applied and earlier.end <= call.start for earlier in op.calls):
                yield f"{_name(history, op)} was applied, and then turned away"
            pauses = [
                each for other in history.ops if other.kind == "pause" and other.content == b"1" for each in other.calls
            ]
            if not any(each.start < call.end and each.model == call.model for each in pauses):
                yield f"{_name(history, op)} was turned away, but nobody had paused the client"


def _explained(history: History, scopes: list[Scope]) -> bool:
    """Search for operations of unknown outcome that fill the versions nobody was told of (I1, I3, I4)."""
    uncertain = [op for op in history.ops if op.models]
    taken = {op.request.rid for scope in scopes for op in scope.placed.values()}

    def scope_at(index: int, used: frozenset[str]) -> bool:
        return index == len(scopes) or version(index, 1, Point(initial(CONFIG)), used, set())

    def version(index: int, seq: int, point: Point, used: frozenset[str], failed: set[bytes]) -> bool:
        """Whether this version can follow; `point` is the one before, `failed` what steps led to in its place."""
        scope = scopes[index]
        if not scope.reads.get(seq - 1, set()) <= {point.state.digest} | failed:
            return False
        failing = _taken_back(history, point)
        if seq > scope.length:
            beyond = {shown: digests for shown, digests in scope.reads.items() if shown >= seq}
            last = all(shown == seq and digests <= failing for shown, digests in beyond.items())
            fine = scope.probe is None or scope.probe == answer_of(advance(point.state, PROBE))
            if last and fine and scope_at(index + 1, used):
                return True
            if scope.probe is not None or not beyond:
                return False  # else a reader was shown what nobody was told to have been applied
        if seq in scope.placed:
            op = scope.placed[seq]
            answered = [following for following in point.after(op) if _answered(op, following)]
            return any(version(index, seq + 1, following, used, failing) for following in answered)
        deadline = min((op.acknowledged for later, op in scope.placed.items() if later > seq), default=float("inf"))
        return any(
            version(index, seq + 1, following, used | {op.request.rid}, failing)
            for op in uncertain
            if scope.model in op.models and op.request.rid not in used and op.start < deadline
            for following in point.after(op)
        )

    return scope_at(0, frozenset(taken))


def _taken_back(history: History, point: Point) -> set[bytes]:
    """What may have followed for a moment: an entry is there to be read before its step fails, and is then undone."""
    failed = [op for op in history.ops if op.kind == "predict" and any(call.error for call in op.calls)]
    return {after.state.digest for op in failed for after in point.after(op)}


def _answered(op: Op, following: Point) -> bool:
    answers = {applied.answer for applied in op.applied} - {None}
    return op.kind == "reset" or answers <= following.answers(op)


def _name(history: History, op: Op) -> str:
    return f"{op.kind} {history.ops.index(op)}"
