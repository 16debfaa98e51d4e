-- Takes over entries that have been idle for long, with their counts as they were.
--
-- KEYS  1 stream
-- ARGV  1 group, 2 consumer, 3 least idle time in ms, 4 where to look from (an XPENDING start),
--       5 how many to take at most, 6 how many to look at, at most, then ids that are not to be taken
-- Reply {id looked at last, or '0-0' at the end of the pending list; {{id, fields, count, idle ms}, ...};
--       {deleted id, ...}}
-- Promise: what is returned belongs to the consumer, is fresh, and counts as often delivered as before;
--       deleted entries that were due are no longer pending. Sending it again takes nothing that was taken
--       a moment ago.

local PAGE = 100
-- Behind this id the server accepts no start of a page.
local LARGEST = '18446744073709551615-18446744073709551615'

local err = unusable()
if err then return err end

local least_idle, want, left = tonumber(ARGV[3]), tonumber(ARGV[5]), tonumber(ARGV[6])
local held = {}
for i = 7, #ARGV do held[ARGV[i]] = true end
local from, last, due = ARGV[4], '0-0', {}
local ended = false
while not ended and #due < want and left > 0 do
  local size = math.min(PAGE, left)
  local page = redis.call('XPENDING', KEYS[1], ARGV[1], from, '+', size)
  ended = #page < size
  for i, entry in ipairs(page) do
    last = entry[1]
    if entry[3] >= least_idle and not held[entry[1]] then
      due[#due + 1] = {entry[1], entry[4], entry[3]}
      if #due == want then
        ended = ended and i == #page
        break
      end
    end
  end
  ended = ended or last == LARGEST
  from = '(' .. last
  left = left - size
end
if ended then last = '0-0' end

local entries, gone = claim(ARGV[2], due)
return {last, entries, gone}
