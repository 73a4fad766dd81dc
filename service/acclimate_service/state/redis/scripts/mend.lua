-- Removes what is no value of the service's from under its names: nobody could read it, and nothing else would.
--
-- KEYS: the registry, then others of one client. ARGV: of each, the type that it has.

local broken = '0'
for i, key in ipairs(KEYS) do
  local kind = redis.call('TYPE', key).ok
  if kind ~= 'none' and kind ~= ARGV[i] then
    redis.call('UNLINK', key)
    if i == 1 then broken = '1' end
  end
end
return {'OK', broken}
