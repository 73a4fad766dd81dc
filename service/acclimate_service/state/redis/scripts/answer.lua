-- Stores the answer of a journal entry. The first one stays: whoever sends another gets that one back.

local keys = {registry = KEYS[1], markers = KEYS[2], answers = KEYS[3], answer_times = KEYS[4]}
local rid, tag, answer = unpack(ARGV, 1, 3)
local key_ttl, answer_bytes = tonumber(ARGV[4]), tonumber(ARGV[5])

local marker = redis.call('HGET', keys.markers, rid)
local marked_tag, life = string.match(marker or '', '^.-|.-|.-|(.-)|(.-)$')
if marked_tag ~= tag or life ~= registry_at(keys.registry).life then return {'GONE'} end

local stored = redis.call('HGET', keys.answers, rid)
if not stored then store_answer(keys, rid, answer, now_ms(), key_ttl, answer_bytes) end
return {'OK', stored}
