-- Removes a client from every model scope, and uploads that are under way. What stays is a tombstone without data, and
-- the markers: they are hashes, and refuse late repeats.
--
-- KEYS: registry, answers, answer times, then head, journal, lease, live snapshot and kept states of each scope, then each
-- upload.
-- ARGV: life, life of the tombstone, its TTL, number of scopes, then model and live snapshot id of each scope, then the
-- id of each upload.

local registry_key = KEYS[1]
local life, tombstone, tombstone_ttl = unpack(ARGV, 1, 3)
local first_upload = 5 + 2 * ARGV[4]

local registry, parts = {}, 0
local flat = redis.call('HGETALL', registry_key)
for i = 1, #flat, 2 do
  registry[flat[i]] = flat[i + 1]
  if string.match(flat[i], '^[mu]:') then parts = parts + 1 end
end

if (registry.life or '') ~= life then return {'OK', registry.life == tombstone and '1' or '0'} end
if parts ~= ARGV[4] + #ARGV - first_upload + 1 then return {'CONFLICT'} end
for i = 5, first_upload - 1, 2 do
  if registry['m:' .. ARGV[i]] ~= ARGV[i + 1] then return {'CONFLICT'} end
end
for i = first_upload, #ARGV do
  if not registry['u:' .. ARGV[i]] then return {'CONFLICT'} end
end

-- The first write frees memory, so a full Redis lets the script pass. `from` is empty: no life goes on in a tombstone.
for _, key in ipairs(KEYS) do redis.call('UNLINK', key) end
redis.call('HSET', registry_key, 'life', tombstone, 'from', '', 'gone', '1')
redis.call('PEXPIRE', registry_key, tombstone_ttl)
return {'OK', '1'}
