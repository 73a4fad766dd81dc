"""The numbers of the per-client state protocol."""

from dataclasses import dataclass, fields

KIB = 1024
MIB = 1024 * KIB
SECOND = 1000
MINUTE = 60 * SECOND
HOUR = 60 * MINUTE
DAY = 24 * HOUR


@dataclass(frozen=True, slots=True)
class Limits:
    """Sizes in bytes, times in milliseconds (`_ms`), counts otherwise; all positive but for `chunk_gap_ms`.

    Args:
        inline_max: largest state kept inside its head; a larger one becomes a chunked snapshot.
        full_max: largest state written whole because its batch is larger still.
        chunk_bytes: size of a chunk; just below 1 MiB, where an allocator's next size class begins.
        chunk_gap_ms: pause between two chunks of a snapshot that nobody waits for; may be 0.
        read_chunks: chunks fetched per round trip when a snapshot is read.
        lease_ms: how long the replica that writes a journal keeps others waiting, renewed by every entry.
        steal_after_ms: longest wait for the lease of another replica.
        journal_entries, journal_bytes: largest journal; above it batches are refused until a snapshot succeeds.
        snapshot_entries: a snapshot is due at that many entries of the journal,
        snapshot_replay_ms: or when replaying them takes that long,
        snapshot_idle_ms: or when the client has been idle that long.
        keep_every_ms: least time between two states that are kept to go back to.
        upload_ttl_ms: life of an upload that nobody commits, renewed per chunk.
        state_ttl_ms: life of an idle client's state.
        key_ttl_ms: life of an idempotency marker.
        key_cap: markers per client above which the oldest may go early, though never younger than `key_min_ms`.
        key_min_ms: must exceed the longest time within which anybody retries a request.
        answer_max: largest answer stored for retries.
        answer_bytes: stored answers per client; the oldest go first.
        resend: how often a script without reply is sent again.
        uncounted_bytes: that a client may grow before it is counted anew, or a quarter of its size if that is more.
        timeline_points: most points of a client's timeline, which is thinned out long before.
        tries: how often a change that met another one is attempted.
        jitter_ms: longest random pause before a repeat.

    Raises:
        ValueError: a number that is too small, or a `key_min_ms` above `key_ttl_ms`.
    """

    inline_max: int = 128 * KIB
    full_max: int = MIB
    chunk_bytes: int = 1_047_552
    chunk_gap_ms: int = 2
    read_chunks: int = 4
    lease_ms: int = 3 * SECOND
    steal_after_ms: int = SECOND
    journal_entries: int = 256
    journal_bytes: int = 64 * MIB
    snapshot_entries: int = 64
    snapshot_replay_ms: int = 2 * SECOND
    snapshot_idle_ms: int = 30 * SECOND
    keep_every_ms: int = 10 * MINUTE
    upload_ttl_ms: int = MINUTE
    state_ttl_ms: int = 7 * DAY
    key_ttl_ms: int = DAY
    key_cap: int = 4096
    key_min_ms: int = 15 * MINUTE
    answer_max: int = 64 * KIB
    answer_bytes: int = 4 * MIB
    resend: int = 2
    uncounted_bytes: int = KIB
    timeline_points: int = 1024
    tries: int = 5
    jitter_ms: int = 20

    def __post_init__(self) -> None:
        for field in fields(self):
            value, least = getattr(self, field.name), 0 if field.name == "chunk_gap_ms" else 1
            if value < least:
                raise ValueError(f"{field.name} is {value}; accepted is any whole number from {least} on")
        if self.key_min_ms > self.key_ttl_ms:
            raise ValueError(f"key_min_ms {self.key_min_ms} exceeds key_ttl_ms {self.key_ttl_ms}; lower one of them")

    @property
    def tombstone_ttl_ms(self) -> int:
        """Life of a deleted client's tombstone: it outlives every marker."""
        return 2 * self.key_ttl_ms
