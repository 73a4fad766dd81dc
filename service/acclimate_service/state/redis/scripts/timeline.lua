-- What became of a client, from a place of its timeline on; nothing of a client that is not there.
--
-- KEYS: head, timeline. ARGV: that place, as of LRANGE.

local seq = redis.call('HGET', KEYS[1], 'seq')
return {'OK', seq, seq and redis.call('LRANGE', KEYS[2], ARGV[1], -1) or {}}
