-- Removes a client from every model scope. What stays is a tombstone without data, and the markers: they are hashes,
-- and refuse late repeats.
--
-- KEYS: registry, answers, answer times, then head, journal, lease and live snapshot of each scope.
-- ARGV: life, life of the tombstone, its TTL, then model and live snapshot id of each scope.

local registry_key = KEYS[1]
local life, tombstone, tombstone_ttl = unpack(ARGV, 1, 3)

local registry, scopes = {}, 0
local flat = redis.call('HGETALL', registry_key)
for i = 1, #flat, 2 do
  registry[flat[i]] = flat[i + 1]
  if string.sub(flat[i], 1, 2) == 'm:' then scopes = scopes + 1 end
end

if registry.life ~= life then return {'OK', registry.life == tombstone and '1' or '0'} end
if scopes ~= (#ARGV - 3) / 2 then return {'CONFLICT'} end
for i = 4, #ARGV, 2 do
  if registry['m:' .. ARGV[i]] ~= ARGV[i + 1] then return {'CONFLICT'} end
end

-- The first write frees memory, so a full Redis lets the script pass. `from` is empty: no life goes on in a tombstone.
for _, key in ipairs(KEYS) do redis.call('UNLINK', key) end
redis.call('HSET', registry_key, 'life', tombstone, 'from', '', 'gone', '1')
redis.call('PEXPIRE', registry_key, tombstone_ttl)
return {'OK', '1'}
