-- Frees the place of a client that is deleted. KEYS: as in `place`. ARGV: its name.

redis.call('ZREM', KEYS[1], ARGV[1])
return {'OK'}
