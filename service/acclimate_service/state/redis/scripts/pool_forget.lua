-- Takes a client's shares out of the pool, of every configuration: those of one life, or all.
--
-- KEYS: the pool. ARGV: client, life or empty.

local pool, client, life = KEYS[1], ARGV[1], ARGV[2]
local flat, left = redis.call('HGETALL', pool), {}
for i = 1, #flat, 2 do
  local digest, name = string.match(flat[i], '^(.-)|(.*)$')
  if name == client and (life == '' or string.match(flat[i + 1], '^(.-)|') == life) then
    redis.call('HDEL', pool, flat[i])
  elseif digest then
    left[digest] = true
  end
end
for i = 1, #flat, 2 do
  if not string.find(flat[i], '|', 1, true) and not left[flat[i]] then redis.call('HDEL', pool, flat[i]) end
end
return {'OK', '1'}
