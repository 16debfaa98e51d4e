-- Takes up again what this consumer already has pending, with the counts given.
--
-- KEYS  1 stream
-- ARGV  1 group, 2 consumer, then for each entry: id, count
-- Reply {0, {{id, fields, count, idle ms}, ...}, {deleted id, ...}}
-- Promise: only what the consumer owns is touched; another's entries and settled ones are left out of the
--       reply. Deleted ones are no longer pending. Sending it again returns the same.

local err = unusable()
if err then return err end

local wanted = {}
for i = 3, #ARGV, 2 do
  local owner, idle = owner_of(ARGV[i])
  if owner == ARGV[2] then wanted[#wanted + 1] = {ARGV[i], tonumber(ARGV[i + 1]), idle} end
end
local entries, gone = claim(ARGV[2], wanted)
return {0, entries, gone}
