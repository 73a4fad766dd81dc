-- The replicas that are there: each says of itself what there is to see, again and again, and is gone some time after.
--
-- KEYS: hash: replica -> '<when, ms>|<what, JSON>'. ARGV: how long it counts (ms), then replica and what it says, if it
-- is one that speaks; it says nothing where it ends. Returns name, age (ms) and what was said, for each.

local lasts, name, said = tonumber(ARGV[1]), ARGV[2], ARGV[3]

local now = now_ms()
if name and said == '' then
  redis.call('HDEL', KEYS[1], name)
elseif name then
  redis.call('HSET', KEYS[1], name, stamp(now) .. '|' .. said)
  redis.call('PEXPIRE', KEYS[1], whole(lasts))
end
local there, told = redis.call('HGETALL', KEYS[1]), {'OK'}
for i = 1, #there, 2 do
  local at, what = string.match(there[i + 1], '^(.-)|(.*)$')
  if now - tonumber(at) < lasts then
    told[#told + 1], told[#told + 2], told[#told + 3] = there[i], whole(math.max(0, now - tonumber(at))), what
  elseif name then
    redis.call('HDEL', KEYS[1], there[i])
  end
end
return told
