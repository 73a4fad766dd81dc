-- One chunk of an upload. The TTL of the upload must not be put on a live snapshot by a late copy of this script.

local life, sid, index, bytes, upload_ttl = unpack(ARGV)
local registry_key, head_key, snapshot_key = unpack(KEYS)

if redis.call('HGET', head_key, 'snap') == sid then return {'OK'} end
local refusal = refuse_life(registry_at(registry_key), life, head_key)
if refusal then return refusal end

redis.call('HSET', snapshot_key, index, bytes)
redis.call('PEXPIRE', snapshot_key, upload_ttl)
return {'OK'}
