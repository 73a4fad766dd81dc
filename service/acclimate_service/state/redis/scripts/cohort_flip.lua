-- Makes uploaded layers the next version of the cohort. The layers before stay until all participants have finished:
-- whoever goes on with the round needs both.

local keys = {head = KEYS[1], oldest = KEYS[2], previous = KEYS[3], layers = KEYS[4]}
local basis_tag, tag, previous_sid, sid, chunks, length, digest, unfinished = unpack(ARGV, 1, 8)
local ttl = tonumber(ARGV[9])

local version, found, snap, n, len, sum = unpack(redis.call('HMGET', keys.head, 'version', 'tag', 'snap', 'n', 'len',
  'sum'))
if found == tag then return {'OK', version} end
if (found or '') ~= basis_tag or (snap or '') ~= previous_sid then return {'CONFLICT'} end
if redis.call('HLEN', keys.layers) ~= tonumber(chunks) then return {'INCOMPLETE'} end

version = whole((version or 0) + 1)

-- The first write grows, so a full Redis refuses the script whole; the later ones it lets pass.
redis.call('HSET', keys.head, 'v', '1', 'version', version, 'tag', tag, 'snap', sid, 'n', chunks, 'len', length,
  'sum', digest, 'psnap', snap or '', 'pn', n or '0', 'plen', len or '0', 'psum', sum or '', 'unfinished', unfinished,
  'at', whole(now_ms()))
redis.call('UNLINK', keys.oldest)
redis.call('PEXPIRE', keys.head, whole(ttl))
redis.call('PEXPIRE', keys.previous, whole(ttl * 1.5)) -- the head dies first
redis.call('PEXPIRE', keys.layers, whole(ttl * 1.5))
return {'OK', version}
