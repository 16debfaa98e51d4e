-- Sets the delivery counts of entries that are about to be started, or puts back those of entries that were
-- only fetched.
--
-- KEYS  1 stream
-- ARGV  1 group, 2 'keep', then for each entry: id, consumer, count
-- Reply for each entry DONE, NOT_PENDING (settled), ANOTHERS or GONE (deleted, and no longer pending then)
-- Promise: only what the consumer named still owns is touched, and is fresh then. Sending it again changes
--       nothing.

local err = unusable()
if err then return err end

local outcomes = {}
for i = 3, #ARGV, 3 do
  local id, consumer = ARGV[i], ARGV[i + 1]
  local outcome
  local owner = owner_of(id)
  if not owner then
    outcome = NOT_PENDING
  elseif owner ~= consumer then
    outcome = ANOTHERS
  elseif not exists(id) then
    redis.call('XACK', KEYS[1], ARGV[1], id)
    outcome = GONE
  else
    redis.call('XCLAIM', KEYS[1], ARGV[1], consumer, 0, id, 'RETRYCOUNT', ARGV[i + 2], 'JUSTID')
    outcome = DONE
  end
  outcomes[#outcomes + 1] = outcome
end
return outcomes
