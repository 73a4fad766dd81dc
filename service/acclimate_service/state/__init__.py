"""The state of every client, in Redis: exactly once, whatever fails.

`Session` serves one client on one replica; `StateStore` is the door to Redis behind it. `connect` and `Wire` bring both
to a Redis or a Redis Cluster, `check` refuses one that could lose state, and `Announcements` hear what other replicas
say.
"""

from acclimate_service.state.claims import (
    Claims,
)
from acclimate_service.state.context import (
    Context,
)
from acclimate_service.state.entry import (
    Batch,
)
from acclimate_service.state.errors import (
    ClientDeleted,
    ClientUnknown,
    Contended,
    Effect,
    JournalFull,
    KeyReused,
    KeyUsedBeforeDelete,
    OtherModel,
    OutOfOrder,
    RequestRunning,
    StateCorrupt,
    StateError,
    StateUnreadable,
    StepFailed,
    StoreFull,
    StoreUnavailable,
    StoreUnfit,
)
from acclimate_service.state.journal import (
    Journal,
)
from acclimate_service.state.journal_records import (
    Answered,
    Appended,
    Busy,
    Fenced,
    Flipped,
    Full,
    Opened,
    Stale,
    Undone,
)
from acclimate_service.state.limits import (
    Limits,
)
from acclimate_service.state.machine import (
    Applied,
    Change,
    Looked,
    Machine,
    Policy,
    Present,
    Request,
    Start,
    always,
)
from acclimate_service.state.observing import (
    Observer,
    Silent,
)
from acclimate_service.state.records import (
    Absent,
    Attempt,
    Basis,
    CommitOutcome,
    Committed,
    Conflict,
    Deleted,
    DeleteOutcome,
    Description,
    Gone,
    Head,
    Incomplete,
    Lease,
    Loaded,
    Marker,
    Mismatch,
    Moved,
    ReadOutcome,
    Replay,
    ResetOutcome,
    Restored,
    Snapshot,
    Used,
)
from acclimate_service.state.redis.announcements import (
    DROP,
    HAND_OVER,
    Announcements,
)
from acclimate_service.state.redis.checks import (
    Durability,
    StoreFacts,
    check,
    check_windows,
    inspect,
)
from acclimate_service.state.redis.keys import (
    ClientScope,
    fingerprint,
    new_id,
    random_rid,
)
from acclimate_service.state.redis.link import (
    Link,
    Single,
    dial,
)
from acclimate_service.state.redis.wire import (
    Wire,
    connect,
)
from acclimate_service.state.session import (
    Session,
)
from acclimate_service.state.store import (
    StateStore,
)

__all__ = [
    "DROP",
    "HAND_OVER",
    "Absent",
    "Announcements",
    "Answered",
    "Appended",
    "Applied",
    "Attempt",
    "Basis",
    "Batch",
    "Busy",
    "Change",
    "Claims",
    "ClientDeleted",
    "ClientScope",
    "ClientUnknown",
    "CommitOutcome",
    "Committed",
    "Conflict",
    "Contended",
    "Context",
    "DeleteOutcome",
    "Deleted",
    "Description",
    "Durability",
    "Effect",
    "Fenced",
    "Flipped",
    "Full",
    "Gone",
    "Head",
    "Incomplete",
    "Journal",
    "JournalFull",
    "KeyReused",
    "KeyUsedBeforeDelete",
    "Lease",
    "Limits",
    "Link",
    "Loaded",
    "Looked",
    "Machine",
    "Marker",
    "Mismatch",
    "Moved",
    "Observer",
    "Opened",
    "OtherModel",
    "OutOfOrder",
    "Policy",
    "Present",
    "ReadOutcome",
    "Replay",
    "Request",
    "RequestRunning",
    "ResetOutcome",
    "Restored",
    "Session",
    "Silent",
    "Single",
    "Snapshot",
    "Stale",
    "Start",
    "StateCorrupt",
    "StateError",
    "StateStore",
    "StateUnreadable",
    "StepFailed",
    "StoreFacts",
    "StoreFull",
    "StoreUnavailable",
    "StoreUnfit",
    "Undone",
    "Used",
    "Wire",
    "always",
    "check",
    "check_windows",
    "connect",
    "dial",
    "fingerprint",
    "inspect",
    "new_id",
    "random_rid",
]
