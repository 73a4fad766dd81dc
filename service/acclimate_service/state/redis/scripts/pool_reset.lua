-- Lets no row count that was told so far. The shares stay, so that none of these rows is told as a new one.
--
-- KEYS: the pool. ARGV: number of kinds of rows.

local pool, kinds = KEYS[1], tonumber(ARGV[1])
local flat = redis.call('HGETALL', pool)
for i = 1, #flat, 2 do
  if string.find(flat[i], '|', 1, true) then
    local kept = string.match(flat[i + 1], '^' .. string.rep('[^|]*|', 4 + kinds))
    redis.call('HSET', pool, flat[i], kept .. string.sub(string.rep('|0', kinds), 2))
  end
end
return {'OK', '1'}
