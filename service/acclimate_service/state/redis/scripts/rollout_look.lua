-- Notes what a replica has loaded, and tells what is to be loaded, and what all replicas have that were heard of lately.
--
-- KEYS: hash of rollouts by model; hash of reports by replica. ARGV: the replica; its report, empty if it ends;
-- milliseconds after which a replica that says nothing is no more.

local rollouts, reports = unpack(KEYS)
local replica, report, longest = ARGV[1], ARGV[2], tonumber(ARGV[3])

local now = now_ms()
if report == '' then
  redis.call('HDEL', reports, replica)
else
  local at, said = string.match(redis.call('HGET', reports, replica) or '', '^([^|]*)|(.*)$')
  if said ~= report or now - tonumber(at) > longest / 4 then
    redis.call('HSET', reports, replica, stamp(now) .. '|' .. report)
  end
end
local all, living = redis.call('HGETALL', reports), {}
for i = 1, #all, 2 do
  local at, said = string.match(all[i + 1], '^([^|]*)|(.*)$')
  if now - tonumber(at) > longest then
    redis.call('HDEL', reports, all[i])
  else
    living[#living + 1] = all[i]
    living[#living + 1] = said
  end
end
return {'OK', redis.call('HGETALL', rollouts), living}
