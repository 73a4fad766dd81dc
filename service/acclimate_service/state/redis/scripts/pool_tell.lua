-- Takes a client's evidence into the pool. What it told before is replaced, so telling twice counts once; of all that it
-- ever told, no more rows count than its weight.
--
-- KEYS: the pool, a hash: digest of a configuration -> its text; digest|client -> share.
-- ARGV: client, digest and text of its configuration, the point of its history (life, seq, born), lifetime, weight, most
-- clients of a configuration, most configurations, seed of the lot, then the counts of all its rows by kind.

local pool = KEYS[1]
local client, digest, text, life, seq, born = unpack(ARGV, 1, 6)
local ttl, weight, most_clients, most_configurations = tonumber(ARGV[7]), tonumber(ARGV[8]), tonumber(ARGV[9]), tonumber(ARGV[10])
local counts = {unpack(ARGV, 12)}
local now = now_ms()

local function split(share)
  local parts = {}
  for part in string.gmatch(share, '[^|]+') do parts[#parts + 1] = part end
  return parts -- life, seq, born, when it was told, counts by kind, counted ones by kind
end

local field = digest .. '|' .. client
local share = redis.call('HGET', pool, field)
local known = share and split(share)
if known and known[1] == life and tonumber(known[2]) >= tonumber(seq) then return {'OK', '0'} end

-- Rows of a record that goes on were told before; one that started again, in this life or another, has only new ones.
local continues = known and known[1] == life and known[3] == born
local new, coming, counted, room = {}, 0, {}, weight
for kind = 1, #counts do
  new[kind] = math.max(0, counts[kind] - (continues and known[4 + kind] or 0))
  coming = coming + new[kind]
  counted[kind] = known and tonumber(known[4 + #counts + kind]) or 0
  room = room - counted[kind]
end
if not known and coming == 0 then return {'OK', '0'} end -- nothing enters before a label

-- Drawn by lot where there is no room for all of them, so that what they say decides nothing.
math.randomseed(tonumber(ARGV[11]))
for _ = 1, math.min(room, coming) do
  local lot, kind = math.random(coming), 1
  while lot > new[kind] do
    lot, kind = lot - new[kind], kind + 1
  end
  new[kind], counted[kind], coming = new[kind] - 1, counted[kind] + 1, coming - 1
end

-- A new share needs a place: that of one which nobody extended, or, for a new configuration, those of the one with the
-- fewest clients. Where a configuration has all its clients, the first ones stay.
if not known then
  local sizes, newest, configurations = {}, {}, 0
  local flat = redis.call('HGETALL', pool)
  for i = 1, #flat, 2 do
    local owner = string.match(flat[i], '^(.-)|')
    local told = owner and tonumber(split(flat[i + 1])[4])
    if told and told + ttl <= now then
      redis.call('HDEL', pool, flat[i])
    elseif owner then
      sizes[owner], newest[owner] = (sizes[owner] or 0) + 1, math.max(newest[owner] or 0, told)
    end
  end
  local least
  for i = 1, #flat, 2 do
    local owner = flat[i]
    if sizes[owner] then
      configurations = configurations + 1
      local smaller = not least or sizes[owner] < sizes[least]
      if smaller or (sizes[owner] == sizes[least] and newest[owner] < newest[least]) then least = owner end
    elseif not string.find(owner, '|', 1, true) then
      redis.call('HDEL', pool, owner)
    end
  end
  if (sizes[digest] or 0) >= most_clients then return {'OK', '0'} end
  if not sizes[digest] and configurations >= most_configurations then
    for i = 1, #flat, 2 do
      if flat[i] == least or string.match(flat[i], '^(.-)|') == least then redis.call('HDEL', pool, flat[i]) end
    end
  end
end

local point = {life, seq, born, stamp(now)}
redis.call('HSET', pool, digest, text, field, table.concat({table.concat(point, '|'), table.concat(counts, '|'), table.concat(counted, '|')}, '|'))
redis.call('PEXPIRE', pool, whole(ttl))
return {'OK', '1'}
