-- Puts coarser points in the place of finer ones, as long as the timeline is the one that was read; it may have grown.
--
-- KEYS: timeline. ARGV: how many points there were, the first and the last of them, then place and new point, empty where
-- one goes, for each that changes.

local count, first, last = tonumber(ARGV[1]), ARGV[2], ARGV[3]
local found = redis.call('LINDEX', KEYS[1], 0) == first and redis.call('LINDEX', KEYS[1], count - 1) == last
if not found then return {'STALE'} end

redis.call('LREM', KEYS[1], 0, '') -- finds nothing: a first write that needs no memory lets a full Redis pass the others
for i = 4, #ARGV, 2 do redis.call('LSET', KEYS[1], ARGV[i], ARGV[i + 1]) end
redis.call('LREM', KEYS[1], 0, '')
return {'OK'}
