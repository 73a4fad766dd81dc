-- Takes a client's shares out of the pool, of every configuration: those of one life, or all.
--
-- KEYS: the pool. ARGV: client, life or empty.

local pool, client, life = KEYS[1], ARGV[1], ARGV[2]
local sizes, changed = cjson.decode(redis.call('HGET', pool, '@sizes') or '{}'), false
for digest, size in pairs(sizes) do
  local field = digest .. '|' .. client
  local share = redis.call('HGET', pool, field)
  if share and (life == '' or string.match(share, '^(.-)|') == life) then
    redis.call('HDEL', pool, field)
    sizes[digest], changed = size - 1, true
    if size == 1 then
      redis.call('HDEL', pool, digest)
      sizes[digest] = nil
    end
  end
end
if changed then redis.call('HSET', pool, '@sizes', cjson.encode(sizes)) end
if next(sizes) == nil then redis.call('UNLINK', pool) end
return {'OK', '1'}
