-- Writes, to see whether that can be done.
--
-- KEYS: a key for this purpose. ARGV: its lifetime (ms).

redis.call('SET', KEYS[1], '1', 'PX', ARGV[1])
return {'OK'}
