-- Forgets that a client was active.

redis.call('ZREM', KEYS[1], ARGV[1])
return {'OK'}
