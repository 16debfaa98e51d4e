-- Tries a command, for the sake of its error.
--
-- KEYS  1 stream
-- ARGV  the command and its arguments
-- Reply 1, or the command's error, with ? for what is no plain text
-- Promise: does what the command does.

local err = failed(redis.pcall(unpack(ARGV)))
if err then return redis.error_reply((string.gsub(err, '[^ -~]', '?'))) end
return 1
