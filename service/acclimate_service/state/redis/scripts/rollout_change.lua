-- Replaces the rollout of a model, unless somebody else has changed it meanwhile.
--
-- KEYS: hash of rollouts by model. ARGV: the model; the rollout that is to be replaced, empty for none; the new one.

local name, before, after = unpack(ARGV)
local found = redis.call('HGET', KEYS[1], name)
if found == after then return {'OK'} end -- an earlier copy of this script did it
if (found or '') ~= before then return {'CONFLICT'} end
redis.call('HSET', KEYS[1], name, after)
return {'OK'}
