-- Takes a client's evidence into the pool. What it told before is replaced, so telling twice counts once; of all that it
-- ever told, no more rows count than its weight.
--
-- KEYS: the pool, a hash: digest of a configuration -> its text; digest|client -> share; @sizes -> how many clients each
-- configuration has, as JSON; @searched -> when places were last looked for.
-- ARGV: client, digest and text of its configuration, the point of its history (life, seq, born), lifetime, weight, most
-- clients of a configuration, most configurations, seed of the lot, pause between searches, whose share it may take the
-- place of (a life, or empty), then its rows by kind.

local pool = KEYS[1]
local client, digest, text, life, seq, born = unpack(ARGV, 1, 6)
local ttl, weight = tonumber(ARGV[7]), tonumber(ARGV[8])
local most_clients, most_configurations, search_ms = tonumber(ARGV[9]), tonumber(ARGV[10]), tonumber(ARGV[12])
local over, counts = ARGV[13], {unpack(ARGV, 14)}
local now = now_ms()

local function split(share)
  local parts = {}
  for part in string.gmatch(share, '[^|]+') do parts[#parts + 1] = part end
  for kind = (#parts - 4) / 2 + 1, #counts do -- one of before there were so many kinds: those that came since are the last
    table.insert(parts, 4 + kind, 0)
    parts[#parts + 1] = 0
  end
  return parts -- life, seq, born, when it was told, counts by kind, counted ones by kind
end

local field = digest .. '|' .. client
local share = redis.call('HGET', pool, field)
local known = share and split(share)
if known and known[1] == life and tonumber(known[2]) >= tonumber(seq) then return {'OK', '0'} end

-- A share never goes back to an earlier life, whose rows would count anew, and after them those of the later one once more.
local owner = known and known[1] or ''
if owner ~= life and owner ~= over then return {'OK', 'CHANGED'} end

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

-- A new share needs a place. Where there is none, one is looked for among all shares: at most once in so long, for that
-- takes its time, and who gets none now asks again with the next label.
if not known then
  local sizes = cjson.decode(redis.call('HGET', pool, '@sizes') or '{}')
  local configurations, least = 0, nil
  for owner, size in pairs(sizes) do
    configurations = configurations + 1
    if not least or size < sizes[least] or (size == sizes[least] and owner < least) then least = owner end
  end
  if not sizes[digest] and configurations < most_configurations then sizes[digest] = 0 end
  if not sizes[digest] or sizes[digest] >= most_clients then
    if now - tonumber(redis.call('HGET', pool, '@searched') or 0) < search_ms then return {'OK', '0'} end
    redis.call('HSET', pool, '@searched', stamp(now))
    -- Of a full configuration, shares that nobody extended; for a new one, all of that with the fewest clients.
    local owner, all = digest, false
    if not sizes[digest] then owner, all = least, true end
    local flat = redis.call('HGETALL', pool)
    for i = 1, #flat, 2 do
      if string.match(flat[i], '^(.-)|') == owner and (all or tonumber(split(flat[i + 1])[4]) + ttl <= now) then
        redis.call('HDEL', pool, flat[i])
        sizes[owner] = sizes[owner] - 1
      end
    end
    if all then
      redis.call('HDEL', pool, owner)
      sizes[owner], sizes[digest] = nil, 0
    end
    if sizes[digest] >= most_clients then return {'OK', '0'} end
  end
  sizes[digest] = sizes[digest] + 1
  redis.call('HSET', pool, '@sizes', cjson.encode(sizes))
end

local parts = {life, seq, born, stamp(now), table.concat(counts, '|'), table.concat(counted, '|')}
redis.call('HSET', pool, digest, text, field, table.concat(parts, '|'))
redis.call('PEXPIRE', pool, whole(ttl))
return {'OK', '1'}
