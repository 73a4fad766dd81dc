-- Takes a client from the list of open questions. KEYS: as in `asked_tell`. ARGV: client, then a life, of which alone
-- questions are taken away, or empty for any.

local list, times = KEYS[1], KEYS[2]
local client, life = ARGV[1], ARGV[2]

local known = redis.call('HGET', list, client)
if known and (life == '' or string.match(known, '^(.-)|') == life) then
  redis.call('HDEL', list, client)
  redis.call('ZREM', times, client)
end
return {'OK'}
