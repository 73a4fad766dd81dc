-- Everything one client has in one model scope, in one read, and who writes its journal. Extends its TTLs only while
-- it has every key of the scope, the live snapshot included: a head extended alone would outlive its snapshot. Where no
-- snapshot is live, the one that is named is of an earlier version, and there is nothing else that it would outlive.

local rid, sid, model = ARGV[1], ARGV[2], ARGV[4]
local state_ttl = tonumber(ARGV[3])
local keys = {registry = KEYS[1], head = KEYS[4], journal = KEYS[5], snapshot = KEYS[6], timeline = KEYS[8]}

local registry = registry_at(keys.registry)
local touched = '0'
local snap = redis.call('HGET', keys.head, 'snap')
if (snap == sid or snap == '') and redis.call('PTTL', keys.head) < state_ttl / 2 then
  if snap == '' then keys.snapshot = nil end
  extend_scope(keys, state_ttl)
  touched = '1'
end
return {
  'OK', registry.life, registry.gone and '1' or '0', registry.origin,
  redis.call('HGET', KEYS[2], rid), redis.call('HGET', KEYS[3], rid), redis.call('HGETALL', keys.head), touched,
  redis.call('GET', KEYS[7]), redis.call('PTTL', KEYS[7]), redis.call('HGET', keys.registry, 'm:' .. model),
}
