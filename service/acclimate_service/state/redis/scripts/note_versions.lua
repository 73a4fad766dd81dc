-- Notes versions of models, each once and for good, in the order in which they come.
--
-- KEYS: a list of texts. ARGV: the texts.

for _, text in ipairs(ARGV) do
  if not redis.call('LPOS', KEYS[1], text) then redis.call('RPUSH', KEYS[1], text) end
end
return {'OK', unpack(redis.call('LRANGE', KEYS[1], 0, -1))}
