-- Takes the last journal entry back, because its step failed: only its own writer may, and only while nobody else can
-- have told the caller that it was applied.

local keys = {
  registry = KEYS[1], markers = KEYS[2], marker_times = KEYS[3], answers = KEYS[4], head = KEYS[5], journal = KEYS[6],
}
local rid, entry_tag, new_tag, life, fence, number = unpack(ARGV, 1, 6)

local head = redis.call('HMGET', keys.head, 'seq', 'tag', 'fence', 'jn', 'jb')
local seq, tag, holder, entries, bytes = unpack(head)
if tag == new_tag then return {'OK', seq} end
local registry = registry_at(keys.registry)
local refusal = refuse_life(registry, life, keys.head)
if refusal then return refusal end
if holder ~= fence then return {'FENCED'} end
if tag ~= entry_tag then return conflict(registry, keys.head) end
if redis.call('HEXISTS', keys.answers, rid) == 1 then return {'ANSWERED'} end
local size = tonumber(string.match(redis.call('HGET', keys.journal, seq .. 'm'), '|(%d+)$'))

-- The first write frees memory, so a full Redis lets the script pass.
redis.call('HDEL', keys.journal, seq, seq .. 'm')
redis.call('HDEL', keys.markers, rid)
redis.call('ZREM', keys.marker_times, rid)
seq = whole(seq - 1)
redis.call('HSET', keys.head, 'seq', seq, 'tag', new_tag, 'jn', whole(entries - 1), 'jb', whole(bytes - size),
  'num', number)
return {'OK', seq}
