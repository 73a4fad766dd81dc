-- Puts fewer and coarser points in the place of the oldest ones, as long as these are still the oldest.
--
-- KEYS: timeline. ARGV: how many there were, the first and the last of them, then what takes their place.

local count, first, last = tonumber(ARGV[1]), ARGV[2], ARGV[3]
local found = redis.call('LINDEX', KEYS[1], 0) == first and redis.call('LINDEX', KEYS[1], count - 1) == last
if not found then return {'STALE'} end

-- The first write frees memory, so a full Redis lets the script pass.
local life = redis.call('PTTL', KEYS[1])
redis.call('LTRIM', KEYS[1], count, -1)
for i = #ARGV, 4, -1 do redis.call('LPUSH', KEYS[1], ARGV[i]) end
redis.call('PEXPIRE', KEYS[1], life)
return {'OK'}
