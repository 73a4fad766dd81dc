-- Counts a client among those of its tenant, or refuses a new one. Who is counted already is never refused.
--
-- KEYS: a sorted set: name of a client -> when its place is free again (ms).
-- ARGV: name, '1' for a new client, most clients, lifetime of a place (ms).

local places, name, new = KEYS[1], ARGV[1], ARGV[2]
local most, ttl = tonumber(ARGV[3]), tonumber(ARGV[4])

local now = now_ms()
redis.call('ZREMRANGEBYSCORE', places, '-inf', stamp(now))
if new == '1' and not redis.call('ZSCORE', places, name) and redis.call('ZCARD', places) >= most then
  return {'FULL'}
end
redis.call('ZADD', places, stamp(now + ttl), name)
redis.call('PEXPIRE', places, whole(ttl))
return {'OK'}
