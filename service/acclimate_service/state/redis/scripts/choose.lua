-- Notes that a configuration which a client has already was chosen for it.
--
-- KEYS: registry, head. ARGV: the configuration. Nothing is noted if the client has another by now.

local registry_key, head_key = unpack(KEYS)

if redis.call('HGET', head_key, 'cfg') == ARGV[1] then note_chosen(registry_key, ARGV[1]) end
return {'OK'}
