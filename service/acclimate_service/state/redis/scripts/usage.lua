-- How many clients of a tenant there are, and how many bytes they take. KEYS: as in `place`.

local now = now_ms()
for _, gone in ipairs(redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', stamp(now))) do free_place(KEYS[1], KEYS[2], gone) end
return {'OK', redis.call('ZCARD', KEYS[1]), redis.call('HGET', KEYS[2], '') or '0'}
