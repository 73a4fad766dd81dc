-- DELTA commit: the batch is added to the journal, together with the marker of its request. The state it leads to is
-- computed by whoever needs it.

local keys = {
  registry = KEYS[1], markers = KEYS[2], marker_times = KEYS[3], answers = KEYS[4], answer_times = KEYS[5],
  head = KEYS[6], journal = KEYS[7], lease = KEYS[8], snapshot = KEYS[9],
}
local ask = {rid = ARGV[1], fp = ARGV[2], tag = ARGV[3], life = ARGV[4]}
local basis_tag, fence, sid, model, entry = unpack(ARGV, 5, 9)
local entries_cap, bytes_cap, lease_ms = tonumber(ARGV[10]), tonumber(ARGV[11]), tonumber(ARGV[12])
local state_ttl, key_ttl = tonumber(ARGV[13]), tonumber(ARGV[14])
local key_min, key_cap, number = tonumber(ARGV[15]), tonumber(ARGV[16]), ARGV[17]

local registry = registry_at(keys.registry)
local refusal = refuse_attempt(registry, ask, keys)
if refusal then return refusal end
local head = redis.call('HMGET', keys.head, 'seq', 'tag', 'fence', 'snap', 'jn', 'jb')
local seq, tag, holder, snap, entries, bytes = unpack(head)
if holder ~= fence then return {'FENCED'} end
if tag ~= basis_tag then return conflict(registry, keys.head) end
if entries + 1 > entries_cap or bytes + #entry > bytes_cap then return {'JFULL'} end

local now = now_ms()
seq = whole(seq + 1)

-- The first write grows, so a full Redis refuses the script whole; the later ones it lets pass.
redis.call('HSET', keys.journal, seq, entry, seq .. 'm', table.concat({ask.tag, ask.rid, #entry}, '|'))
redis.call('HSET', keys.head, 'seq', seq, 'tag', ask.tag, 'jn', whole(entries + 1), 'jb', whole(bytes + #entry))
count_to(keys, number)
remember(keys, ask, model, seq, registry.life, now, key_ttl)
sweep_markers(keys, now, key_ttl, key_min, key_cap)
redis.call('SET', keys.lease, fence, 'PX', lease_ms)
if snap == sid then
  extend_scope(keys, state_ttl)
else
  redis.call('PEXPIRE', keys.journal, whole(state_ttl * 1.5)) -- a part may outlive the head, but not be without end
end
return {'OK', seq, registry.life, '0', snap == sid and '1' or '0'}
