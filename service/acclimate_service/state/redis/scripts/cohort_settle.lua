-- All participants have finished: the layers before the round are needed no longer.

local head, previous, tag = KEYS[1], KEYS[2], ARGV[1]

if redis.call('HGET', head, 'tag') ~= tag then return {'CONFLICT'} end
redis.call('UNLINK', previous)
redis.call('HSET', head, 'unfinished', '', 'psnap', '', 'pn', '0', 'plen', '0', 'psum', '')
return {'OK'}
