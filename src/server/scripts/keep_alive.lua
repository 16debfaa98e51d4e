-- Keeps entries fresh that are being worked on, so that nobody claims them.
--
-- KEYS  1 stream
-- ARGV  1 group, then for each entry: id, consumer
-- Reply {{id, ...} that another consumer owns, {id, ...} that were deleted, {id, ...} pending for nobody}
-- Promise: only what the consumer named still owns is touched; counts stay. A deleted entry stays pending
--       (a claim would drop it), so that its verdict still finds it. Sending it again changes nothing.

local err = unusable()
if err then return err end

local anothers, gone, settled = {}, {}, {}
local kept = {}
for i = 2, #ARGV, 2 do
  local id, consumer = ARGV[i], ARGV[i + 1]
  local owner = owner_of(id)
  if not owner then
    settled[#settled + 1] = id
  elseif owner ~= consumer then
    anothers[#anothers + 1] = id
  elseif not exists(id) then
    gone[#gone + 1] = id
  else
    local ids = kept[consumer]
    if not ids then
      ids = {}
      kept[consumer] = ids
    end
    ids[#ids + 1] = id
  end
end
for consumer, ids in pairs(kept) do
  ids[#ids + 1] = 'JUSTID'
  redis.call('XCLAIM', KEYS[1], ARGV[1], consumer, 0, unpack(ids))
end
return {anothers, gone, settled}
