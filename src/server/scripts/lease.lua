-- Extends a lease.
--
-- KEYS  1 lease
-- ARGV  1 token, 2 how long from now, in ms
-- Reply 1 extended, 0 there is none, -1 another's
-- Promise: another's lease is not touched.

local token = redis.call('GET', KEYS[1])
if not token then return 0 end
if token ~= ARGV[1] then return -1 end
return redis.call('PEXPIRE', KEYS[1], ARGV[2])
