-- What is stored of a client in one model scope, at one moment: two reads could be of two existences.

return {'OK', redis.call('HMGET', KEYS[1], 'cfg', 'seq', 'len', 'base', 'jn', 'jb', 'paused'), redis.call('PTTL', KEYS[1]),
  redis.call('GET', KEYS[2]), redis.call('HGETALL', KEYS[3]), redis.call('HGET', KEYS[4], 'chosen')}
