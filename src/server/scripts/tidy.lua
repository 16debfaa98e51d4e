-- Removes consumers of a group that have nothing pending.
--
-- KEYS  1 stream
-- ARGV  1 group, 2 least idle time in ms, 3 'all' or 'only', then names: those to leave alone, or the only
--       ones to look at
-- Reply how many were removed
-- Promise: a consumer with pending entries stays: removing it would discard them.

local err = unusable()
if err then return err end

local named = {}
for i = 4, #ARGV do named[ARGV[i]] = true end

local removed = 0
for _, info in ipairs(redis.call('XINFO', 'CONSUMERS', KEYS[1], ARGV[1])) do
  local consumer = {}
  for i = 1, #info, 2 do consumer[info[i]] = info[i + 1] end
  local meant = named[consumer['name']] or false
  if meant == (ARGV[3] == 'only') and consumer['pending'] == 0 and consumer['idle'] >= tonumber(ARGV[2]) then
    redis.call('XGROUP', 'DELCONSUMER', KEYS[1], ARGV[1], consumer['name'])
    removed = removed + 1
  end
end
return removed
