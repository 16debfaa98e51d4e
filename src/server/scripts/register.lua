-- Makes entries pending in a group that was made anew, for the consumers that work on them.
--
-- KEYS  1 stream
-- ARGV  1 group, then for each entry: id, consumer, count
-- Reply how many were made pending
-- Promise: only entries that exist and are pending for nobody. Sending it again changes nothing.

local err = unusable()
if err then return err end

local registered = 0
for i = 2, #ARGV, 3 do
  local id = ARGV[i]
  if not owner_of(id) and exists(id) then
    redis.call('XCLAIM', KEYS[1], ARGV[1], ARGV[i + 1], 0, id, 'FORCE', 'RETRYCOUNT', ARGV[i + 2], 'JUSTID')
    registered = registered + 1
  end
end
return registered
