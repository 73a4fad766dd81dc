"""The state of every client, in Redis: exactly once, whatever fails.

`Session` serves one client on one replica; `StateStore` is the door to Redis behind it. `connect` and `Wire` bring both
to a Redis or a Redis Cluster, `check` refuses one that could lose state, and `Announcements` hear what other replicas
say.
"""

from acclimate_service.state.contract import (
    Applied,
    Change,
    Earlier,
    Lineage,
    Looked,
    Policy,
    Present,
    Request,
    Start,
    always,
)
from acclimate_service.state.encoding import Batch
from acclimate_service.state.errors import (
    ClientDeleted,
    ClientUnknown,
    Contended,
    JournalFull,
    KeyReused,
    KeyUsedBeforeDelete,
    OtherModel,
    OutOfOrder,
    Paused,
    RequestRunning,
    StateCorrupt,
    StateError,
    StateUnreadable,
    StepFailed,
    StoreFull,
    StoreUnavailable,
    VersionUnknown,
)
from acclimate_service.state.held import Context
from acclimate_service.state.limits import Limits
from acclimate_service.state.places import Places
from acclimate_service.state.records import Description, Kept
from acclimate_service.state.redis.announcements import Announcements
from acclimate_service.state.redis.checks import Probe, StoreFacts, check, check_windows
from acclimate_service.state.redis.keys import ClientScope, fingerprint, new_id, random_rid
from acclimate_service.state.redis.link import Link
from acclimate_service.state.redis.wire import Wire, connect
from acclimate_service.state.replay_queue import ReplayQueue
from acclimate_service.state.session import Session
from acclimate_service.state.store import StateStore

__all__ = [
    "Announcements",
    "Applied",
    "Batch",
    "Change",
    "ClientDeleted",
    "ClientScope",
    "ClientUnknown",
    "Contended",
    "Context",
    "Description",
    "Earlier",
    "JournalFull",
    "Kept",
    "KeyReused",
    "KeyUsedBeforeDelete",
    "Limits",
    "Lineage",
    "Link",
    "Looked",
    "OtherModel",
    "OutOfOrder",
    "Paused",
    "Places",
    "Policy",
    "Present",
    "Probe",
    "ReplayQueue",
    "Request",
    "RequestRunning",
    "Session",
    "Start",
    "StateCorrupt",
    "StateError",
    "StateStore",
    "StateUnreadable",
    "StepFailed",
    "StoreFacts",
    "StoreFull",
    "StoreUnavailable",
    "VersionUnknown",
    "Wire",
    "always",
    "check",
    "check_windows",
    "connect",
    "fingerprint",
    "new_id",
    "random_rid",
]
