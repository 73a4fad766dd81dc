-- Composed in front of every script by the loader.
--
-- Replies start with a status word. A refusal is returned before the first write: Redis does not roll back a script
-- that fails half-way. A missing value is `false` on the way in and out of redis.call.

local function whole(number)
  return string.format('%.0f', number) -- tostring(1.7e12) is '1.7e+12'
end

-- With its microseconds: two changes within a millisecond keep their order.
local function now_ms()
  local time = redis.call('TIME')
  return time[1] * 1000 + time[2] / 1000
end

local function stamp(now)
  return string.format('%.3f', now)
end

local function registry_at(key)
  local life, origin, gone = unpack(redis.call('HMGET', key, 'life', 'from', 'gone'))
  return {life = life or '', origin = origin or '', gone = gone == '1'}
end

local function conflict(registry, head_key)
  return {'CONFLICT', registry.life, redis.call('HGETALL', head_key)}
end

-- C2. A tombstone was created by a DELETE, never by somebody who continued the life before it.
local function refuse_life(registry, life, head_key)
  if registry.life == life then return nil end
  if not registry.gone and registry.origin == life then return conflict(registry, head_key) end
  return {'GONE'}
end

-- C1 to C3. `ask` holds the rid, fp, tag and life of this attempt.
local function refuse_attempt(registry, ask, keys)
  local marker = redis.call('HGET', keys.markers, ask.rid)
  local fp, model, seq, tag, life
  if marker then
    fp, model, seq, tag, life = string.match(marker, '^(.-)|(.-)|(.-)|(.-)|(.-)$')
    if tag == ask.tag then return {'OK', seq, life, '1'} end
  end
  local refusal = refuse_life(registry, ask.life, keys.head)
  if refusal or not marker then return refusal end
  if life ~= registry.life then return {'USED'} end
  if fp ~= ask.fp then return {'MISMATCH'} end
  return {'REPLAY', seq, model, redis.call('HGET', keys.answers, ask.rid), life}
end

-- The life that a change of this client belongs to: a new one where there was none, or a tombstone.
local function live(registry, keys, new_life)
  if registry.life ~= '' and not registry.gone then return registry.life end
  redis.call('HDEL', keys.registry, 'gone')
  redis.call('HSET', keys.registry, 'life', new_life, 'from', registry.life)
  return new_life
end

-- The head dies first: a live head never points at parts that are gone.
local function extend_scope(keys, state_ttl)
  redis.call('PEXPIRE', keys.head, whole(state_ttl))
  local parts_ttl = whole(state_ttl * 1.5)
  redis.call('PEXPIRE', keys.journal, parts_ttl)
  if keys.snapshot then redis.call('PEXPIRE', keys.snapshot, parts_ttl) end
  redis.call('PEXPIRE', keys.registry, parts_ttl)
  if keys.timeline then redis.call('PEXPIRE', keys.timeline, parts_ttl) end
end

-- Earlier states of a client that are kept: slot -> '<version>|<when, ms>|<length>|<sha>|<chunks>|<configuration>'.
--
-- KEYS from `first` on: this index, then the key of each slot, which holds the chunks. `most` are kept, two of them at
-- least `every` ms apart; those from version `back` on are forgotten, for a rollback left them behind.
local function keeping(first, most, every, back, head_key, snapshot_key)
  if most == 0 and back == 0 then return nil end
  local keep = {index = KEYS[first], slots = {unpack(KEYS, first + 1)}, found = {}, most = most, every = every, back = back}
  local flat = redis.call('HGETALL', keep.index)
  for i = 1, #flat, 2 do
    local seq, at = string.match(flat[i + 1], '^(%d+)|(%d+)')
    keep.found[#keep.found + 1] = {slot = flat[i], seq = tonumber(seq), at = tonumber(at)}
  end
  table.sort(keep.found, function(one, other) return one.seq > other.seq end)

  -- What is about to be replaced is kept, unless there is one that is little older.
  local head = redis.call('HMGET', head_key, 'base', 'at', 'len', 'sum', 'n', 'cfg', 'st', 'snap')
  local base, at, length, digest, chunks, config, state, sid = unpack(head)
  local newest = keep.found[1]
  if back > 0 or not at or length == '0' or (newest and tonumber(at) - newest.at < every) then return keep end
  if sid ~= '' and redis.call('HLEN', snapshot_key) ~= tonumber(chunks) then return keep end
  keep.state, keep.sid = state, sid
  keep.meta = table.concat({base, at, length, digest, sid == '' and '1' or chunks, config}, '|')
  table.insert(keep.found, 1, {seq = tonumber(base), at = tonumber(at)})
  return keep
end

-- The further back, the wider apart: the newest one that is not missed much goes, else the oldest.
local function thin(keep)
  local found = keep.found
  for i = 2, #found - 1 do
    if found[i - 1].at - found[i + 1].at <= keep.every * 4 ^ (i - 1) then return table.remove(found, i) end
  end
  return table.remove(found)
end

-- Writes what `keeping` decided; the snapshot that is kept takes the name of its slot.
local function keep_states(keep, snapshot_key, state_ttl)
  if not keep then return end
  local function forget(state)
    redis.call('HDEL', keep.index, state.slot)
    redis.call('UNLINK', keep.slots[state.slot + 1])
  end
  while keep.back > 0 and keep.found[1] and keep.found[1].seq >= keep.back do forget(table.remove(keep.found, 1)) end
  if not keep.meta then return end
  while #keep.found > keep.most do forget(thin(keep)) end
  local taken, slot = {}, 0
  for _, state in ipairs(keep.found) do taken[state.slot or ''] = true end
  while taken[whole(slot)] do slot = slot + 1 end
  local key = keep.slots[slot + 1]
  if keep.sid ~= '' then
    redis.call('RENAME', snapshot_key, key)
  else
    redis.call('UNLINK', key)
    redis.call('HSET', key, '0', keep.state)
  end
  redis.call('HSET', keep.index, whole(slot), keep.meta)
  redis.call('PEXPIRE', keep.index, whole(state_ttl))
  for _, each in ipairs(keep.slots) do redis.call('PEXPIRE', each, whole(state_ttl * 1.5)) end
end

-- What outlives versions of the model: the configuration that somebody chose. A DELETE takes it away, or time.
local function note_chosen(registry_key, config)
  redis.call('HSET', registry_key, 'chosen', config)
end

-- One absolute time: a hash and its index must not expire a millisecond apart.
local function expire_together(at, hash, index)
  redis.call('PEXPIREAT', hash, whole(at))
  redis.call('PEXPIREAT', index, whole(at))
end

-- The place of a client among those of its tenant, and its bytes, which count no more.
local function free_place(places, sizes, name)
  local bytes = redis.call('HGET', sizes, name)
  if bytes then redis.call('HINCRBY', sizes, '', 0 - bytes) end
  redis.call('HDEL', sizes, name)
  redis.call('ZREM', places, name)
end

local function remember(keys, ask, model, seq, life, now, key_ttl)
  redis.call('HSET', keys.head, 'on', whole(now)) -- of the change; a snapshot that is taken later changes nothing
  redis.call('HSET', keys.markers, ask.rid, table.concat({ask.fp, model, seq, ask.tag, life}, '|'))
  redis.call('ZADD', keys.marker_times, stamp(now), ask.rid)
  expire_together(now + key_ttl, keys.markers, keys.marker_times)
end

-- The model version that a state was begun by. For that of the scope nothing is noted.
local function note_version(keys, version)
  if version == '' then redis.call('HDEL', keys.head, 'ver') else redis.call('HSET', keys.head, 'ver', version) end
end

-- The number of the newest numbered batch. One without a number leaves it.
local function count_to(keys, number)
  if number ~= '0' then redis.call('HSET', keys.head, 'num', number) end
end

-- Adds a point to the timeline, once for each version: '<version>|<when, ms>|<replica before, if another>|<what, JSON>'.
-- What comes too late, or again as when a journal is replayed, changes nothing.
local function note(keys, seq, replica, point, now, most)
  if point == '' then return end
  local noted, before = unpack(redis.call('HMGET', keys.head, 'ts', 'tr'))
  if noted and tonumber(seq) <= tonumber(noted) then return end
  local taken_over = before and before ~= replica and before or ''
  redis.call('HSET', keys.head, 'ts', seq, 'tr', replica)
  if string.sub(point, 1, 3) ~= '[0,' then -- a batch: what lists of clients show of it
    local shift, agreement = string.match(point, '"shift":([%d.e+-]+)'), string.match(point, '"agreement":([%d.e+-]+)')
    redis.call('HSET', keys.head, 'sh', shift or '', 'ag', agreement or '')
  end
  redis.call('RPUSH', keys.timeline, table.concat({seq, stamp(now), taken_over, point}, '|'))
  redis.call('LTRIM', keys.timeline, -most, -1) -- thinned out long before, unless that fails
end

local function drop_answer(keys, rid)
  local size = redis.call('HSTRLEN', keys.answers, rid)
  redis.call('HDEL', keys.answers, rid)
  redis.call('ZREM', keys.answer_times, rid)
  return redis.call('HINCRBY', keys.registry, 'ab', 0 - size) -- `-size` would send '-0', which is no integer
end

local function store_answer(keys, rid, answer, now, key_ttl, answer_bytes)
  -- Answers expire long before the registry that counts their bytes.
  if redis.call('EXISTS', keys.answers) == 0 then redis.call('HSET', keys.registry, 'ab', '0') end
  redis.call('HSET', keys.answers, rid, answer)
  redis.call('ZADD', keys.answer_times, stamp(now), rid)
  expire_together(now + key_ttl, keys.answers, keys.answer_times)
  local stored = redis.call('HINCRBY', keys.registry, 'ab', #answer)
  while stored > answer_bytes do
    stored = drop_answer(keys, redis.call('ZRANGE', keys.answer_times, 0, 0)[1])
  end
end

local SWEEP = 8

-- Late retries are refused by their marker, so none goes before key_min, however many there are.
local function sweep_markers(keys, now, key_ttl, key_min, key_cap)
  for _ = 1, SWEEP do
    local rid, marked = unpack(redis.call('ZRANGE', keys.marker_times, 0, 0, 'WITHSCORES'))
    local age = now - tonumber(marked)
    local crowded = redis.call('ZCARD', keys.marker_times) > key_cap
    if age <= key_min or not (age > key_ttl or crowded) then return end
    redis.call('HDEL', keys.markers, rid)
    redis.call('ZREM', keys.marker_times, rid)
    drop_answer(keys, rid)
  end
end
