-- Notes that a client was active. The index is bounded: whoever was active longest ago goes first, and whose state has
-- expired meanwhile goes too.

local index, client = KEYS[1], ARGV[1]
local cap, ttl = tonumber(ARGV[2]), tonumber(ARGV[3])

redis.call('ZREMRANGEBYSCORE', index, '-inf', stamp(now_ms() - ttl))
redis.call('ZADD', index, stamp(now_ms()), client)
redis.call('ZREMRANGEBYRANK', index, 0, 0 - cap - 1)
redis.call('PEXPIRE', index, whole(ttl))
return {'OK'}
