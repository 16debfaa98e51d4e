-- Acknowledges entries and deletes those that no group needs any more: for servers without XACKDEL.
--
-- KEYS  1 stream
-- ARGV  1 group, 2 'xdel', then ids
-- Reply how many were pending
-- Promise: what another group has not had yet or has pending stays. Sending it again deletes no more.

local err = unusable()
if err then return err end

local taken = 0
for i = 3, #ARGV do
  local refused, pending = take(ARGV[i])
  if refused then return redis.error_reply(refused) end
  if pending then taken = taken + 1 end
end
return taken
