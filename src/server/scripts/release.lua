-- Gives a lease up.
--
-- KEYS  1 lease
-- ARGV  1 token
-- Reply 1 given up, 0 not ours
-- Promise: another's lease is not touched.

if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
return redis.call('DEL', KEYS[1])
