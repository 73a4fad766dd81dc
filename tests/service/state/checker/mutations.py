"""Each safeguard of the protocol, taken away. A checker that does not notice proves nothing.

A mutation is a profile: edits of scripts, patches of the flow, and rates that make the fault it matters for frequent.
"""

from collections.abc import Mapping
from typing import Any

from checker import flows
from checker.faults import RATES
from checker.profile import Edit, Patch, Profile

from acclimate_service.guard.fleet import Heard
from acclimate_service.state import StateStore, session
from acclimate_service.state.entries import Entries
from acclimate_service.state.held import Snapshotter
from acclimate_service.state.journal import Journal
from acclimate_service.state.outcomes import Loaded, Reply
from acclimate_service.state.redis import wire
from acclimate_service.state.repeats import Repeats
from acclimate_service.state.replay import Replay
from acclimate_service.state.session import _Visit
from acclimate_service.state.writer import Writer


def _raised(**rates: float) -> Mapping[str, float]:
    return {**RATES, **{name.replace("__", ": ").replace("_", " "): rate for name, rate in rates.items()}}


_MARKER_CHECKS = """  if life ~= registry.life then return {'USED'} end
  if fp ~= ask.fp then return {'MISMATCH'} end
  return {'REPLAY', seq, model, redis.call('HGET', keys.answers, ask.rid), life}
"""
_MARKER = "  redis.call('HSET', keys.markers, ask.rid, table.concat({ask.fp, model, seq, ask.tag, life}, '|'))\n"
_FP_CHECK = "  if fp ~= ask.fp then return {'MISMATCH'} end\n"
_FLIP_CHECKS = (
    Edit("flip", "if registry_at(keys.registry).life ~= life then return {'GONE'} end\n"),
    Edit("flip", "if holder ~= fence then return {'FENCED'} end\n"),
    Edit("flip", "if (at == seq and tag or string.match(meta_at(at), '^(.-)|')) ~= tag_at then return {'STALE'} end\n"),
)
_SNAPSHOTS: Any = {
    "affinity": 0.9,
    "failing_snapshots": 0.0,
    "unequal": 0.0,
    "resets": 0.0,
    "size": "large",
    "limits": {"snapshot_entries": 2},
}
_FAILING: Any = {
    "failing_steps": 0.25,
    "duplicates": 8.0,
    "deletes": 0.0,
    "resets": 0.0,
    "unequal": 0.0,
    "size": "large",
    "limits": {"lease_ms": 10, "steal_after_ms": 200},
    "rates": _raised(undo__pause_before=0.6),
}
_REWORKS: Any = {
    "reworks": 6.0,
    "resets": 0.0,
    "size": "large",
    "rates": _raised(answer__drop=0.5),
}

MUTATIONS: Mapping[str, Profile] = {
    "1 tag compare in commit": Profile(edits=(Edit("commit", "(tag or '') ~= basis_tag or "),)),
    "pause": Profile(
        edits=(Edit("commit", "if paused ~= '' then redis.call('HSET', keys.head, 'paused', paused) end\n"),),
        pauses=4.0,
    ),
    "pause check": Profile(patches=(Patch(_Visit, "stops_at", lambda visit, at: False),), pauses=4.0),
    "configuration of a kept state": Profile(
        edits=tuple(
            Edit(script, "chunks, config}, '|')", "chunks, 'config 7'}, '|')") for script in ("commit", "flip")
        ),
        rollbacks=6.0,
        reworks=4.0,
    ),
    "kept states in DELETE": Profile(
        edits=(
            Edit(
                "delete",
                "redis.call('UNLINK', key)",
                "if not key:find(':k', 1, true) then redis.call('UNLINK', key) end",
            ),
        ),
        deletes=3.0,
    ),
    "timeline in DELETE": Profile(
        edits=(
            Edit(
                "delete",
                "redis.call('UNLINK', key)",
                "if not key:find(':t', 1, true) then redis.call('UNLINK', key) end",
            ),
        ),
        deletes=3.0,
    ),
    "3 versions for tags": Profile(patches=(Patch(Writer, "write", flows.write_versioned),), deletes=3.0),
    "5 marker check in the scripts": Profile(
        edits=(Edit("commit", _MARKER_CHECKS, "return nil\n"), Edit("append", _MARKER_CHECKS, "return nil\n")),
    ),
    "5 marker": Profile(
        edits=(
            Edit("commit", _MARKER),
            Edit("append", _MARKER),
        ),
    ),
    "6 key of a retry": Profile(apply=flows.retry_as_new),
    "7 fingerprint compare": Profile(
        edits=(Edit("commit", _FP_CHECK), Edit("append", _FP_CHECK), Edit("reset", _FP_CHECK)),
        patches=(Patch(Loaded, "verdict", flows.verdict_by_key),),
    ),
    "7 fingerprint compare on load": Profile(patches=(Patch(Loaded, "verdict", flows.verdict_by_key),)),
    "8 discard of a refused result": Profile(
        patches=(Patch(Journal, "append", flows.append_as_if), Patch(StateStore, "commit", flows.commit_as_if)),
    ),
    "9 all but the chunks in flip": Profile(
        edits=(*_FLIP_CHECKS, Edit("flip", "at <= base or at > seq or snap ~= old_sid", "snap ~= old_sid")),
        rates=_raised(flip__delayed=0.3, flip__pause_before=0.2),
        size="large",
    ),
    "10 marker in reset": Profile(
        edits=(
            Edit(
                "reset",
                "refuse_attempt(registry, ask, keys)\nif refusal",
                "refuse_life(registry, ask.life, keys.head)\nif refusal",
            ),
        ),
        resets=4.0,
    ),
    "11 label of a snapshot": Profile(
        patches=(Patch(Snapshotter, "_take", flows.take_mislabelled),),
        **_SNAPSHOTS,
        rates=_raised(load__slow=0.3, answer__slow=0.3),
    ),
    "12 answers before flip": Profile(
        patches=(Patch(Snapshotter, "_take", flows.take_unsettled),),
        **_SNAPSHOTS,
        rates=_raised(answer__drop=0.5),
    ),
    "13 recomputed answer stored": Profile(
        patches=(Patch(Repeats, "_recompute", flows.recompute_unstored),), **_FAILING
    ),
    "13 answer check in undo": Profile(
        edits=(Edit("undo", "if redis.call('HEXISTS', keys.answers, rid) == 1 then return {'ANSWERED'} end\n"),),
        **_FAILING,
    ),
    "13 other model": Profile(
        patches=(Patch(Repeats, "settle", flows.settle_other_model),),
        **_FAILING,
        second_model=1.0,
        switches=0.7,
    ),
    "17 key_min": Profile(edits=tuple(Edit(name, "age <= key_min or not", "not") for name in ("commit", "append"))),
    "18 chunk count": Profile(
        edits=tuple(
            Edit(name, "redis.call('HLEN', keys.snapshot) ~= tonumber(chunks)", "false") for name in ("flip", "commit")
        ),
        limits={"upload_ttl_ms": 25},
        rates=_raised(chunk__pause_before=0.25, flip__pause_before=0.25),
        failing_snapshots=0.0,
        size="large",
    ),
    "19 live sid in chunk": Profile(
        edits=(Edit("chunk", "if redis.call('HGET', head_key, 'snap') == sid then return {'OK'} end\n"),),
        rates=_raised(chunk__delayed=0.2),
        size="large",
    ),
    "20 TTL in chunk": Profile(
        edits=(Edit("chunk", "redis.call('PEXPIRE', snapshot_key, upload_ttl)\n"),), size="large"
    ),
    "20 snapshot id in delete": Profile(
        edits=(Edit("delete", "if registry['m:' .. ARGV[i]] ~= ARGV[i + 1] then return {'CONFLICT'} end"),),
        rates=_raised(delete__pause_before=0.6),
        deletes=5.0,
        size="large",
        unequal=1.0,
    ),
    "20 name of an upload": Profile(
        edits=(
            Edit("chunk", "redis.call('HSET', registry_key, 'u:' .. sid, model .. '|' .. stamp(now + upload_ttl))\n"),
        ),
        size="large",
    ),
    "20 uploads in delete": Profile(
        edits=(
            Edit("delete", "if parts ~= ARGV[4] + #ARGV - first_upload + 1 then return {'CONFLICT'} end\n"),
            Edit("delete", "if not registry['u:' .. ARGV[i]] then return {'CONFLICT'} end"),
        ),
        rates=_raised(delete__pause_before=0.6),
        deletes=5.0,
        size="large",
        limits={"snapshot_entries": 1, "upload_ttl_ms": 600_000},
    ),
    "number check": Profile(patches=(Patch(session, "_late", lambda request, newest: False),)),
    "number given back by undo": Profile(
        edits=(Edit("undo", ",\n  'num', number)", ")"),),
        **{**_FAILING, "numbered": 1.0},
    ),
    "answers before a whole state": Profile(patches=(Patch(Writer, "_commit", flows.commit_unsettled),), **_REWORKS),
    "reads extend": Profile(
        edits=(Edit("load", "  extend_scope(keys, state_ttl)\n"),), jumps=12.0, reads=4.0, deletes=0.0, resets=0.0
    ),
    "what an earlier existence left": Profile(
        edits=(Edit("open", "keys.journal, keys.snapshot, ", "keys.journal, "),), size="large", affinity=0.9
    ),
    "and when a whole state begins the next": Profile(
        edits=(
            Edit("commit", "snap ~= basis_sid", "(snap ~= basis_sid and tag)"),
            Edit(
                "commit",
                "keys.journal, keys.old_snapshot)",
                "keys.journal, tag and keys.old_snapshot or keys.registry .. '-')",
            ),
        ),
        size="shrinking",
        **{"limits": {"snapshot_entries": 1}},
    ),
    "tag of a state in memory": Profile(patches=(Patch(Replay, "_resumed", flows.resumed_by_version),), deletes=4.0),
    "21 journal cap": Profile(
        edits=(
            Edit("append", "if entries + 1 > entries_cap or bytes + #entry > bytes_cap then return {'JFULL'} end\n"),
        ),
        failing_snapshots=1.0,
        resets=0.0,
        deletes=0.0,
        unequal=0.0,
        size="large",
    ),
}

EVIDENCE: Mapping[str, Profile] = {
    "older share": Profile(
        edits=(
            Edit(
                "pool_tell",
                "if known and known[1] == life and tonumber(known[2]) >= tonumber(seq) then return {'OK', '0'} end\n",
            ),
        )
    ),
    "rows that were told": Profile(edits=(Edit("pool_tell", "continues and known[4 + kind] or 0", "0"),)),
    "weight of a client": Profile(edits=(Edit("pool_tell", "math.min(room, coming)", "coming"),)),
    "nothing before a label": Profile(
        edits=(Edit("pool_tell", "if not known and coming == 0 then return {'OK', '0'} end"),)
    ),
    "share of the deleted": Profile(edits=(Edit("pool_forget", "    redis.call('HDEL', pool, field)\n"),)),
    "number of shares": Profile(
        edits=(Edit("pool_forget", "sizes[digest], changed = size - 1, true", "changed = true"),)
    ),
    "name of what nobody has": Profile(edits=(Edit("pool_forget", "      redis.call('HDEL', pool, digest)\n"),)),
    "lifetime of a pool": Profile(edits=(Edit("pool_tell", "redis.call('PEXPIRE', pool, whole(ttl))\n"),)),
    "life before it is told": Profile(patches=(Patch(Heard, "tell", flows.tell_unasked),)),
}


# Caught by directed scenarios only: the histories that need them are too rare.

VERSIONS = MUTATIONS["3 versions for tags"]
APPEND_TAG = Profile(edits=(Edit("append", "if tag ~= basis_tag then return conflict(registry, keys.head) end\n"),))
LISTED = Profile(patches=(Patch(Replay, "_of_one_history", flows.of_any_history),))
FETCHED = Profile(patches=(Patch(Entries, "fetch", flows.fetch_any),))
FLIP_TAG = Profile(edits=_FLIP_CHECKS[-1:])
RULE_T = Profile(edits=(Edit("load", "(snap == sid or snap == '') and "),))
LIFE = Profile(
    edits=(Edit("commit", "local refusal = refuse_life(registry, ask.life, keys.head)\n", "local refusal\n"),)
)
TOLD_AFTER = Profile(patches=(Patch(Heard, "tell", flows.tell_and_leave),))
TOLD_OVER = Profile(
    edits=(Edit("pool_tell", "if owner ~= life and owner ~= over then return {'OK', 'CHANGED'} end\n"),)
)
KNOWN_AFTER = Profile(patches=(Patch(Heard, "tell", flows.tell_over_a_later_life),))
FORGOTTEN = Profile(
    edits=(Edit("pool_forget", "share and (life == '' or string.match(share, '^(.-)|') == life)", "share"),)
)
S2 = Profile(patches=(Patch(wire, "_effect", lambda unsettled: False), Patch(Reply, "effect", False)))
