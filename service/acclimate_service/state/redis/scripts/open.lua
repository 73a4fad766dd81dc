-- Opens the journal for writing: takes the lease, and a new fence by which whoever had it open before is refused.

local keys = {registry = KEYS[1], head = KEYS[2], journal = KEYS[3], lease = KEYS[4], snapshot = KEYS[5]}
local life, nonce, force, sid, new_life, model, config = unpack(ARGV, 1, 7)
local lease_ms, state_ttl, version = tonumber(ARGV[8]), tonumber(ARGV[9]), ARGV[10]

local registry = registry_at(keys.registry)
local refusal = refuse_life(registry, life, keys.head)
if refusal then return refusal end
local holder = redis.call('GET', keys.lease)
if holder and force ~= '1' and string.match(holder, '%.(.*)$') ~= nonce then
  return {'BUSY', redis.call('PTTL', keys.lease)}
end

local fence, snap = unpack(redis.call('HMGET', keys.head, 'fence', 'snap'))
if not fence then
  -- A head that expired left its snapshot, which only the registry still names; whoever passed its id has it removed.
  local left = redis.call('HGET', keys.registry, 'm:' .. model)
  if left and left ~= '' and left ~= sid then return conflict(registry, keys.head) end
end
local opened = fence and tonumber(string.match(fence, '^(%d+)')) or 0
local new_fence = whole(opened + 1) .. '.' .. nonce

-- The first write grows, so a full Redis refuses the script whole; the later ones it lets pass.
redis.call('HSET', keys.head, 'fence', new_fence)
if not fence then
  redis.call('HSET', keys.head, 'v', '1', 'seq', '0', 'tag', '', 'base', '0', 'st', '', 'snap', '', 'n', '0',
    'len', '0', 'sum', '', 'cfg', config, 'jn', '0', 'jb', '0', 'model', model)
  note_version(keys, version)
  -- those of a head which expired before its parts, and the states kept with it
  redis.call('UNLINK', keys.journal, keys.snapshot, unpack(KEYS, 6))
  life = live(registry, keys, new_life)
  redis.call('HSET', keys.registry, 'm:' .. model, '')
end
redis.call('SET', keys.lease, new_fence, 'PX', lease_ms)
if not fence or snap == sid then extend_scope(keys, state_ttl) end
return {'OK', life, redis.call('HGETALL', keys.head)}
