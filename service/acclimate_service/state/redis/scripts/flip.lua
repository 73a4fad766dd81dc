-- Makes an uploaded snapshot of version `at` the base of the state, and drops the journal up to it.

local keys = {
  registry = KEYS[1], head = KEYS[2], journal = KEYS[3], old_snapshot = KEYS[4], snapshot = KEYS[5],
} -- then, if asked for, those of `keeping`
local life, fence, at, tag_at, old_sid, sid, chunks, length, digest, model = unpack(ARGV, 1, 10)
local state_ttl, most, every = tonumber(ARGV[11]), tonumber(ARGV[12]), tonumber(ARGV[13])
at = tonumber(at)

local head = redis.call('HMGET', keys.head, 'seq', 'tag', 'base', 'snap', 'fence', 'jn', 'jb')
local seq, tag, base, snap, holder, entries, bytes = unpack(head)
if snap == sid then return {'OK'} end
if registry_at(keys.registry).life ~= life then return {'GONE'} end
if holder ~= fence then return {'FENCED'} end

seq, base = tonumber(seq), tonumber(base)
local function meta_at(version)
  return redis.call('HGET', keys.journal, whole(version) .. 'm') or ''
end

if at <= base or at > seq or snap ~= old_sid then return {'STALE'} end
if (at == seq and tag or string.match(meta_at(at), '^(.-)|')) ~= tag_at then return {'STALE'} end
if redis.call('HLEN', keys.snapshot) ~= tonumber(chunks) then return {'INCOMPLETE'} end

local keep = keeping(6, most, every, 0, keys.head, keys.old_snapshot)

-- The first write frees memory, so a full Redis lets the script pass.
keep_states(keep, keys.old_snapshot, state_ttl)
redis.call('UNLINK', keys.old_snapshot)
for version = base + 1, at do
  entries = entries - 1
  bytes = bytes - tonumber(string.match(meta_at(version), '|(%d+)$'))
  redis.call('HDEL', keys.journal, whole(version), whole(version) .. 'm')
end
redis.call('HSET', keys.head, 'base', whole(at), 'st', '', 'snap', sid, 'n', chunks, 'len', length, 'sum', digest,
  'jn', whole(entries), 'jb', whole(bytes), 'at', whole(now_ms()))
redis.call('HSET', keys.registry, 'm:' .. model, sid)
redis.call('HDEL', keys.registry, 'u:' .. sid)
extend_scope(keys, state_ttl)
return {'OK'}
