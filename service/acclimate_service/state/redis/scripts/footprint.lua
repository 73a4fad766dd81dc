-- What a client takes of Redis's memory in one model scope, as Redis counts it, at one moment.
--
-- KEYS: head, live snapshot, then all others. ARGV: id of that snapshot.

local snap = redis.call('HGET', KEYS[1], 'snap') or ''
if snap ~= ARGV[1] then return {'MOVED', snap} end
local bytes = 0
for _, key in ipairs(KEYS) do bytes = bytes + (redis.call('MEMORY', 'USAGE', key, 'SAMPLES', '0') or 0) end
return {'OK', whole(bytes)}
