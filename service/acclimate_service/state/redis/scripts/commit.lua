-- FULL commit: the whole new state replaces the old one, together with the marker and the answer of its request.

local keys = {
  registry = KEYS[1], markers = KEYS[2], marker_times = KEYS[3], answers = KEYS[4], answer_times = KEYS[5],
  head = KEYS[6], journal = KEYS[7], old_snapshot = KEYS[8], snapshot = KEYS[9], timeline = KEYS[10],
} -- then, if asked for, those of `keeping`
local ask = {rid = ARGV[1], fp = ARGV[2], tag = ARGV[3], life = ARGV[4]}
local basis_tag, basis_sid, new_life, model = unpack(ARGV, 5, 8)
local sid, chunks, state, length, digest, config, answer = unpack(ARGV, 9, 15)
local state_ttl, key_ttl, key_min = tonumber(ARGV[16]), tonumber(ARGV[17]), tonumber(ARGV[18])
local key_cap, answer_bytes, number, paused = tonumber(ARGV[19]), tonumber(ARGV[20]), ARGV[21], ARGV[22]
local most, every, back = tonumber(ARGV[23]), tonumber(ARGV[24]), tonumber(ARGV[25])
local version, chosen, replica, point, points = ARGV[26], ARGV[27], ARGV[28], ARGV[29], tonumber(ARGV[30])

local registry = registry_at(keys.registry)
local refusal = refuse_attempt(registry, ask, keys)
if refusal then return refusal end
local seq, tag, snap = unpack(redis.call('HMGET', keys.head, 'seq', 'tag', 'snap'))
-- A head that expired left its snapshot, which only the registry still names; whoever passed its id has it removed.
snap = snap or redis.call('HGET', keys.registry, 'm:' .. model) or ''
if (tag or '') ~= basis_tag or snap ~= basis_sid then return conflict(registry, keys.head) end
if sid ~= '' and redis.call('HLEN', keys.snapshot) ~= tonumber(chunks) then return {'INCOMPLETE'} end

local begins = not seq
local keep = not begins and keeping(11, most, every, back, keys.head, keys.old_snapshot)
local now = now_ms()
seq = whole((seq or 0) + 1)

-- The first write grows, so a full Redis refuses the script whole; the later ones it lets pass.
redis.call('HSET', keys.head, 'v', '1', 'seq', seq, 'tag', ask.tag, 'base', seq, 'st', state, 'snap', sid, 'n', chunks,
  'len', length, 'sum', digest, 'cfg', config, 'jn', '0', 'jb', '0', 'model', model, 'at', whole(now))
redis.call('HSETNX', keys.head, 'fence', '')
note_version(keys, version)
count_to(keys, number)
if paused ~= '' then redis.call('HSET', keys.head, 'paused', paused) end
if begins then redis.call('UNLINK', unpack(KEYS, 10)) end -- those of a head which expired before them
keep_states(keep, keys.old_snapshot, state_ttl)
redis.call('UNLINK', keys.journal, keys.old_snapshot)
local life = live(registry, keys, new_life)
redis.call('HSET', keys.registry, 'm:' .. model, sid)
redis.call('HDEL', keys.registry, 'u:' .. sid)
if chosen == '1' then note_chosen(keys.registry, config) end
remember(keys, ask, model, seq, life, now, key_ttl)
if answer ~= '' then store_answer(keys, ask.rid, answer, now, key_ttl, answer_bytes) end
sweep_markers(keys, now, key_ttl, key_min, key_cap)
note(keys, seq, replica, point, now, points)
extend_scope(keys, state_ttl)
return {'OK', seq, life, '0'}
