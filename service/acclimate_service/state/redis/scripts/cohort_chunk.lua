-- One chunk of an upload. The TTL of the upload must not be put on live layers by a late copy of this script.

local head, layers = KEYS[1], KEYS[2]
local sid, index, bytes, upload_ttl = unpack(ARGV)

if redis.call('HGET', head, 'snap') == sid then return {'OK'} end
redis.call('HSET', layers, index, bytes)
redis.call('PEXPIRE', layers, upload_ttl)
return {'OK'}
