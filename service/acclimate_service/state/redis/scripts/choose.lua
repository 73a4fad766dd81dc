-- Notes that the configuration which a client has was chosen for it. That goes with the registry: by a DELETE, or in time.

local registry_key, head_key = unpack(KEYS)

local config = redis.call('HGET', head_key, 'cfg')
if config then redis.call('HSET', registry_key, 'chosen', config) end
return {'OK'}
