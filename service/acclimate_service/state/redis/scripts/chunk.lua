-- One chunk of an upload, which the registry names until it is the live snapshot or has expired: a DELETE has to find it.
-- The TTL of the upload must not be put on a live snapshot by a late copy of this script.

local life, sid, index, bytes, upload_ttl, model = unpack(ARGV)
local registry_key, head_key, snapshot_key = unpack(KEYS)

if redis.call('HGET', head_key, 'snap') == sid then return {'OK'} end
-- Those that nobody finished: their chunks have expired.
local function forget_uploads(key, now)
  local flat = redis.call('HGETALL', key)
  for i = 1, #flat, 2 do
    local expires = string.sub(flat[i], 1, 2) == 'u:' and string.match(flat[i + 1], '|(.*)$')
    if expires and tonumber(expires) < now then redis.call('HDEL', key, flat[i]) end
  end
end

local refusal = refuse_life(registry_at(registry_key), life, head_key)
if refusal then return refusal end

-- The first write grows, so a full Redis refuses the script whole; the later ones it lets pass.
redis.call('HSET', snapshot_key, index, bytes)
redis.call('PEXPIRE', snapshot_key, upload_ttl)
local now = now_ms()
if index == '0' then forget_uploads(registry_key, now) end
redis.call('HSET', registry_key, 'u:' .. sid, model .. '|' .. stamp(now + upload_ttl))
if redis.call('PTTL', registry_key) < tonumber(upload_ttl) then redis.call('PEXPIRE', registry_key, upload_ttl) end
return {'OK'}
