-- Lists what a client is asked, in the place of what was listed of it; nothing takes it from the list.
--
-- KEYS: the list, a hash: client -> '<life>|<seq>|<questions as JSON>'; a sorted set: client -> when it was told, ms.
-- ARGV: client, life, seq, questions or empty, lifetime, most clients.

local list, times = KEYS[1], KEYS[2]
local client, life, seq, questions = unpack(ARGV, 1, 4)
local ttl, most = tonumber(ARGV[5]), tonumber(ARGV[6])

local known_life, known_seq = string.match(redis.call('HGET', list, client) or '', '^(.-)|(%d+)|')
if known_life == life and tonumber(known_seq) > tonumber(seq) then return {'OK'} end

local now = now_ms()
local gone = redis.call('ZRANGEBYSCORE', times, '-inf', stamp(now - ttl))
if questions == '' then
  gone[#gone + 1] = client
else
  redis.call('HSET', list, client, table.concat({life, seq, questions}, '|'))
  redis.call('ZADD', times, stamp(now), client)
  if redis.call('ZCARD', times) > most then gone[#gone + 1] = redis.call('ZRANGE', times, 0, 0)[1] end
  redis.call('PEXPIRE', list, whole(ttl))
  redis.call('PEXPIRE', times, whole(ttl))
end
for _, each in ipairs(gone) do
  redis.call('HDEL', list, each)
  redis.call('ZREM', times, each)
end
return {'OK'}
