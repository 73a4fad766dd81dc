-- Takes the lease of the cohort's round, or renews it.

local lease, holder, lease_ms = KEYS[1], ARGV[1], ARGV[2]

local present = redis.call('GET', lease)
if present and present ~= holder then return {'BUSY', redis.call('PTTL', lease)} end
redis.call('SET', lease, holder, 'PX', lease_ms)
return {'OK'}
