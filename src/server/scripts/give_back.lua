-- Gives entries back that were fetched and not started: others may claim them at once.
--
-- KEYS  1 stream
-- ARGV  1 group, then for each entry: id, consumer, count
-- Reply how many were given back
-- Promise: only what the consumer named still owns is touched; it stays its owner until somebody claims.
--       The count is what is given. Sending it again changes nothing of importance.

local err = unusable()
if err then return err end

-- Each gets a delivery time before that of all others, of earlier calls too: the server (8.4 and later)
-- keeps pending entries sorted by it, and finds the place of an old one at once only if it is the oldest.
-- Every entry takes longer than a microsecond, so a later call starts below where this one ends. All of
-- these times lie years back. They start over every seventeen days, which costs time then, nothing else.
local PERIOD = 1500000000000
local time = redis.call('TIME')
local microseconds = tonumber(time[1]) * 1000000 + tonumber(time[2])
local delivered = PERIOD + 1000 - microseconds % PERIOD

local given = 0
for i = 2, #ARGV, 3 do
  local id, consumer = ARGV[i], ARGV[i + 1]
  if owner_of(id) == consumer then
    delivered = delivered - 1
    redis.call('XCLAIM', KEYS[1], ARGV[1], consumer, 0, id, 'TIME', string.format('%.0f', delivered),
      'RETRYCOUNT', ARGV[i + 2], 'JUSTID')
    given = given + 1
  end
end
return given
