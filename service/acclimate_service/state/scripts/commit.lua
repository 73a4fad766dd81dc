-- FULL commit: the whole new state replaces the old one, together with the marker and the answer of its request.

local SWEEP = 8

local keys = {
  registry = KEYS[1], markers = KEYS[2], marker_times = KEYS[3], answers = KEYS[4], answer_times = KEYS[5],
  head = KEYS[6], journal = KEYS[7], old_snapshot = KEYS[8], snapshot = KEYS[9],
}
local ask = {rid = ARGV[1], fp = ARGV[2], tag = ARGV[3], life = ARGV[4]}
local basis_tag, basis_sid, new_life, model = unpack(ARGV, 5, 8)
local sid, chunks, state, length, digest, config, answer = unpack(ARGV, 9, 15)
local state_ttl, key_ttl, key_min = tonumber(ARGV[16]), tonumber(ARGV[17]), tonumber(ARGV[18])
local key_cap, answer_bytes = tonumber(ARGV[19]), tonumber(ARGV[20])

local function drop_answer(rid)
  local size = redis.call('HSTRLEN', keys.answers, rid)
  redis.call('HDEL', keys.answers, rid)
  redis.call('ZREM', keys.answer_times, rid)
  return redis.call('HINCRBY', keys.registry, 'ab', 0 - size) -- `-size` would send '-0', which is no integer
end

local function store_answer(now)
  -- Answers expire long before the registry that counts their bytes.
  if redis.call('EXISTS', keys.answers) == 0 then redis.call('HSET', keys.registry, 'ab', '0') end
  redis.call('HSET', keys.answers, ask.rid, answer)
  redis.call('ZADD', keys.answer_times, whole(now), ask.rid)
  expire_together(now + key_ttl, keys.answers, keys.answer_times)
  local stored = redis.call('HINCRBY', keys.registry, 'ab', #answer)
  while stored > answer_bytes do
    stored = drop_answer(redis.call('ZRANGE', keys.answer_times, 0, 0)[1])
  end
end

-- Late retries are refused by their marker, so none goes before key_min, however many there are.
local function sweep_markers(now)
  for _ = 1, SWEEP do
    local rid, stamp = unpack(redis.call('ZRANGE', keys.marker_times, 0, 0, 'WITHSCORES'))
    local age = now - tonumber(stamp)
    local crowded = redis.call('ZCARD', keys.marker_times) > key_cap
    if age <= key_min or not (age > key_ttl or crowded) then return end
    redis.call('HDEL', keys.markers, rid)
    redis.call('ZREM', keys.marker_times, rid)
    drop_answer(rid)
  end
end

local registry = registry_at(keys.registry)
local refusal = refuse_attempt(registry, ask, keys)
if refusal then return refusal end
local seq, tag, snap = unpack(redis.call('HMGET', keys.head, 'seq', 'tag', 'snap'))
if (tag or '') ~= basis_tag or (snap or '') ~= basis_sid then return conflict(registry, keys.head) end
if sid ~= '' and redis.call('HLEN', keys.snapshot) ~= tonumber(chunks) then return {'INCOMPLETE'} end

local now = now_ms()
local fresh = registry.life == '' or registry.gone
local life = fresh and new_life or registry.life
seq = whole((seq or 0) + 1)

-- The first write grows, so a full Redis refuses the script whole; the later ones it lets pass.
redis.call('HSET', keys.head, 'v', '1', 'seq', seq, 'tag', ask.tag, 'base', seq, 'st', state, 'snap', sid, 'n', chunks,
  'len', length, 'sum', digest, 'cfg', config, 'jn', '0', 'jb', '0', 'model', model)
redis.call('HSETNX', keys.head, 'fence', '')
redis.call('UNLINK', keys.journal, keys.old_snapshot)
if fresh then
  redis.call('HDEL', keys.registry, 'gone')
  redis.call('HSET', keys.registry, 'life', life, 'from', ask.life)
end
redis.call('HSET', keys.registry, 'm:' .. model, sid)
remember(keys, ask, model, seq, life, now, key_ttl)
if answer ~= '' then store_answer(now) end
sweep_markers(now)
extend_scope(keys, state_ttl)
return {'OK', seq, life, '0'}
