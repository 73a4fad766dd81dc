-- Takes a client's evidence into the pool. What it told before is replaced, so telling twice counts once.

local shares, totals = KEYS[1], KEYS[2]
local client, configuration, life, seq, born = unpack(ARGV, 1, 5)
local ttl = tonumber(ARGV[6])
local counts = {unpack(ARGV, 7)}

local share = redis.call('HGET', shares, client)
local known = {}
for part in string.gmatch(share or '', '[^|]+') do table.insert(known, part) end
if known[1] == life and tonumber(known[2]) >= tonumber(seq) then return {'OK', '0'} end

-- A record that began anew (another life, or after a reset) adds to what the one before had told.
local before = 0
if known[1] == life and known[3] == born then before = 3 end
local sums = {}
for part in string.gmatch(redis.call('HGET', totals, configuration) or '', '[^|]+') do table.insert(sums, part) end
for i, count in ipairs(counts) do
  sums[i] = whole((tonumber(sums[i]) or 0) + count - (before > 0 and tonumber(known[before + i]) or 0))
end
sums[#counts + 1] = whole((tonumber(sums[#counts + 1]) or 0) + (share and 0 or 1))

redis.call('HSET', shares, client, table.concat({life, seq, born, unpack(counts)}, '|'))
redis.call('HSET', totals, configuration, table.concat(sums, '|'))
redis.call('PEXPIRE', shares, whole(ttl))
redis.call('PEXPIRE', totals, whole(ttl))
return {'OK', '1'}
