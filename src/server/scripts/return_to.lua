-- Gives entries that were claimed by mistake back to the consumer that is working on them.
--
-- KEYS  1 stream
-- ARGV  1 group, then for each entry: id, consumer that has it, consumer that is to have it, count
-- Reply how many were given back
-- Promise: only what the first consumer still owns changes hands, with the count given. Sending it again
--       changes nothing.

local err = unusable()
if err then return err end

local returned = 0
for i = 2, #ARGV, 4 do
  local id, from, to = ARGV[i], ARGV[i + 1], ARGV[i + 2]
  if owner_of(id) == from and exists(id) then
    redis.call('XCLAIM', KEYS[1], ARGV[1], to, 0, id, 'RETRYCOUNT', ARGV[i + 3], 'JUSTID')
    returned = returned + 1
  end
end
return returned
