-- Forgets what one client told: its share of every configuration. The sums stay, of which it can no longer be told apart.
--
-- KEYS: shares of each configuration. ARGV: name of the client.

for _, shares in ipairs(KEYS) do redis.call('HDEL', shares, ARGV[1]) end
return {'OK', '1'}
