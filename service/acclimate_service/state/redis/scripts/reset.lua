-- Back to the initial state at a new version. It carries a marker: a re-sent reset must not wipe what came after it.
-- Where a tag is given, it wipes nothing that came after the change of that tag either.

local keys = {
  registry = KEYS[1], markers = KEYS[2], marker_times = KEYS[3], answers = KEYS[4], answer_times = KEYS[5],
  head = KEYS[6], journal = KEYS[7], lease = KEYS[8], snapshot = KEYS[9], timeline = KEYS[10],
}
local ask = {rid = ARGV[1], fp = ARGV[2], tag = ARGV[3], life = ARGV[4]}
local sid, model, config = unpack(ARGV, 5, 7)
local state_ttl, key_ttl, key_min, key_cap = tonumber(ARGV[8]), tonumber(ARGV[9]), tonumber(ARGV[10]), tonumber(ARGV[11])
local paused, version, chosen, replica, point = unpack(ARGV, 12, 16)
local points, basis_tag = tonumber(ARGV[17]), ARGV[18]

local registry = registry_at(keys.registry)
local refusal = refuse_attempt(registry, ask, keys)
if refusal then return refusal end
local seq, snap, fence, tag = unpack(redis.call('HMGET', keys.head, 'seq', 'snap', 'fence', 'tag'))
if not seq then return {'ABSENT'} end
if snap ~= sid or (basis_tag and tag ~= basis_tag) then return conflict(registry, keys.head) end

local opened = tonumber(string.match(fence, '^(%d+)')) or 0
local now = now_ms()
seq = whole(seq + 1)

-- The first write frees memory, so a full Redis lets the script pass.
redis.call('UNLINK', keys.journal, keys.lease, keys.snapshot)
redis.call('HSET', keys.head, 'seq', seq, 'tag', ask.tag, 'base', seq, 'st', '', 'snap', '', 'n', '0', 'len', '0',
  'sum', '', 'jn', '0', 'jb', '0', 'sh', '', 'ag', '', 'fence', whole(opened + 1) .. '.' .. ask.tag)
note_version(keys, version)
if config ~= '' then redis.call('HSET', keys.head, 'cfg', config) end
if paused ~= '' then redis.call('HSET', keys.head, 'paused', paused) end
redis.call('HSET', keys.registry, 'm:' .. model, '')
if chosen == '1' then note_chosen(keys.registry, config) end
remember(keys, ask, model, seq, registry.life, now, key_ttl)
sweep_markers(keys, now, key_ttl, key_min, key_cap)
note(keys, seq, replica, point, now, points)
extend_scope(keys, state_ttl)
return {'OK', seq, registry.life, '0'}
