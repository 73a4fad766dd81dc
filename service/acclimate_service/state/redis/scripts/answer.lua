-- Stores the answer of a journal entry, and notes it in the timeline. The first one stays: whoever sends another gets
-- that one back.

local keys = {
  registry = KEYS[1], markers = KEYS[2], answers = KEYS[3], answer_times = KEYS[4], head = KEYS[5], timeline = KEYS[6],
}
local rid, tag, answer = unpack(ARGV, 1, 3)
local key_ttl, answer_bytes = tonumber(ARGV[4]), tonumber(ARGV[5])
local replica, point, points = ARGV[6], ARGV[7], tonumber(ARGV[8])

local marker = redis.call('HGET', keys.markers, rid)
local seq, marked_tag, life = string.match(marker or '', '^.-|.-|(.-)|(.-)|(.-)$')
if marked_tag ~= tag or life ~= registry_at(keys.registry).life then return {'GONE'} end

local stored = redis.call('HGET', keys.answers, rid)
if not stored then
  local now = now_ms()
  store_answer(keys, rid, answer, now, key_ttl, answer_bytes)
  if redis.call('EXISTS', keys.head) == 1 then -- of one that has expired, nothing is to begin anew
    note(keys, seq, replica, point, now, points)
    redis.call('PEXPIRE', keys.timeline, redis.call('PTTL', keys.registry)) -- by which DELETE finds it
  end
end
return {'OK', stored}
