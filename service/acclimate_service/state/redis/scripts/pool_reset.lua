-- Lets no row count that was told so far. The shares stay, so that none of these rows is told as a new one.
--
-- KEYS: the pool.

local pool = KEYS[1]
local flat = redis.call('HGETALL', pool)
for i = 1, #flat, 2 do
  if string.find(flat[i], '|', 1, true) then
    local _, bars = string.gsub(flat[i + 1], '|', '')
    local kinds = (bars - 3) / 2 -- after life, seq, born and when: counts by kind, counted ones by kind
    local kept = string.match(flat[i + 1], '^' .. string.rep('[^|]*|', 4 + kinds))
    redis.call('HSET', pool, flat[i], kept .. string.sub(string.rep('|0', kinds), 2))
  end
end
return {'OK', '1'}
