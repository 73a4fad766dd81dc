-- Counts a client and its bytes among those of its tenant, or refuses one that is new or has grown. Who is counted
-- already and has not grown is never refused.
--
-- KEYS: a sorted set: name of a client -> when its place is free again (ms); a hash: name -> bytes, '' -> those of all.
-- ARGV: name, '1' for a new client, most clients, lifetime of a place (ms), bytes that it takes, most bytes of all, or
-- '' for any.

local places, sizes, name, new = KEYS[1], KEYS[2], ARGV[1], ARGV[2]
local most, ttl, bytes, most_bytes = tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[6])

local now = now_ms()
for _, gone in ipairs(redis.call('ZRANGEBYSCORE', places, '-inf', stamp(now))) do free_place(places, sizes, gone) end
if new == '1' and not redis.call('ZSCORE', places, name) and redis.call('ZCARD', places) >= most then
  return {'FULL'}
end
local all, had = unpack(redis.call('HMGET', sizes, '', name))
local more = bytes - (had or 0)
if most_bytes and more > 0 and (all or 0) + more > most_bytes then return {'LARGE', all or '0'} end

redis.call('ZADD', places, stamp(now + ttl), name)
redis.call('HSET', sizes, name, whole(bytes))
redis.call('HINCRBY', sizes, '', whole(more))
expire_together(now + ttl, places, sizes)
return {'OK'}
