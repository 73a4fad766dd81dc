-- Lets so much pass in a time, by the virtual scheduling algorithm of ITU-T I.371 (GCRA): what passes moves the time at
-- which the owner will have used nothing of its quota, and may move it no further ahead than one window. What meets a
-- whole quota always passes.
--
-- KEYS: a string: that time (ms). ARGV: amount, quota, window (ms).

local amount, quota, window = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3])

local now = now_ms()
local idle = math.max(now, tonumber(redis.call('GET', KEYS[1]) or '0'))
local after = idle + amount * window / quota
if idle > now and after > now + window then
  local left = math.max(0, math.floor(quota * (1 - (idle - now) / window)))
  return {'WAIT', whole(math.ceil(math.min(idle, after - window) - now)), whole(left)}
end
redis.call('SET', KEYS[1], stamp(after), 'PX', whole(math.ceil(after - now)))
return {'OK'}
