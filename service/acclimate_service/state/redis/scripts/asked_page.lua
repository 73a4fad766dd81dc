-- Some of the clients that are asked something, those first that were told of last. KEYS: as in `asked_tell`.
-- ARGV: most clients, the time of the last one of the page before, or empty, lifetime.
--
-- After 'OK': of each client its name, its questions, milliseconds until they expire, and when they were told.

local list, times = KEYS[1], KEYS[2]
local most, before, ttl = ARGV[1], ARGV[2], tonumber(ARGV[3])

local page, now = {'OK'}, now_ms()
local newest = before == '' and '+inf' or '(' .. before
local flat = redis.call('ZREVRANGEBYSCORE', times, newest, '(' .. stamp(now - ttl), 'WITHSCORES', 'LIMIT', 0, most)
for i = 1, #flat, 2 do
  page[#page + 1] = flat[i]
  page[#page + 1] = string.match(redis.call('HGET', list, flat[i]), '^.-|%d+|(.*)$')
  page[#page + 1] = whole(flat[i + 1] + ttl - now)
  page[#page + 1] = flat[i + 1]
end
return page
