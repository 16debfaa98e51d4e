-- Lists what a consumer has pending. A script only for the sake of its errors (see unusable).
--
-- KEYS  1 stream
-- ARGV  1 group, 2 consumer, 3 first id, 4 how many at most
-- Reply {{id, consumer, idle ms, count}, ...}
-- Promise: touches nothing.

local err = unusable()
if err then return err end
return redis.call('XPENDING', KEYS[1], ARGV[1], ARGV[3], '+', ARGV[4], ARGV[2])
