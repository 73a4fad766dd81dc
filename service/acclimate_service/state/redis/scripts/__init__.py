"""The Lua scripts: each is one atomic step of the per-client state protocol.

A script decides everything before its first write, touches only keys that are passed in KEYS (all of one hash tag), and
carries no shebang line, so that it runs on Redis 6.2 and later, clustered or not.
"""

from dataclasses import dataclass
from hashlib import sha1
from importlib.resources import files


@dataclass(frozen=True, slots=True)
class Script:
    """One script: its name, full text, SHA-1 for EVALSHA, and whether running it can change a client's history."""

    name: str
    text: str
    sha: str
    decides: bool


def _read(name: str) -> str:
    return files(__name__).joinpath(f"{name}.lua").read_text(encoding="utf-8")


def _compose(name: str, *, decides: bool) -> Script:
    text = f"{_read('_common')}\n{_read(name)}"
    return Script(name, text, sha1(text.encode(), usedforsecurity=False).hexdigest(), decides)


LOAD = _compose("load", decides=False)
DESCRIBE = _compose("describe", decides=False)
FOOTPRINT = _compose("footprint", decides=False)
CHUNK = _compose("chunk", decides=False)
COMMIT = _compose("commit", decides=True)
RESET = _compose("reset", decides=True)
DELETE = _compose("delete", decides=True)
CHOOSE = _compose("choose", decides=False)
OPEN = _compose("open", decides=False)
APPEND = _compose("append", decides=True)
FLIP = _compose("flip", decides=False)
ANSWER = _compose("answer", decides=False)
UNDO = _compose("undo", decides=True)
RELEASE = _compose("release", decides=False)
COHORT_NOTE = _compose("cohort_note", decides=False)
COHORT_FORGET = _compose("cohort_forget", decides=False)
COHORT_LEASE = _compose("cohort_lease", decides=False)
COHORT_CHUNK = _compose("cohort_chunk", decides=False)
COHORT_FLIP = _compose("cohort_flip", decides=True)
COHORT_SETTLE = _compose("cohort_settle", decides=False)
LEAVE = _compose("leave", decides=False)
PLACE = _compose("place", decides=False)
USAGE = _compose("usage", decides=False)
MEND = _compose("mend", decides=False)
NOTE_VERSIONS = _compose("note_versions", decides=False)
ROLLOUT_LOOK = _compose("rollout_look", decides=False)
ROLLOUT_CHANGE = _compose("rollout_change", decides=False)
RATE = _compose("rate", decides=False)
PRESENCE = _compose("presence", decides=False)
TIMELINE = _compose("timeline", decides=False)
THIN = _compose("thin", decides=False)
PROBE = _compose("probe", decides=False)
POOL_TELL = _compose("pool_tell", decides=False)
POOL_FORGET = _compose("pool_forget", decides=False)
POOL_RESET = _compose("pool_reset", decides=False)
ASKED_TELL = _compose("asked_tell", decides=False)
ASKED_FORGET = _compose("asked_forget", decides=False)
ASKED_PAGE = _compose("asked_page", decides=False)
