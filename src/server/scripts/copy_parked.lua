-- Puts entries back into their stream from what stands there, with some fields changed, each together with
-- the acknowledgement of its original.
--
-- KEYS  1 stream
-- ARGV  1 group, 2 'keep', 'xackdel' or 'xdel' (see take), then for each item:
--       id, consumer, number of strings, then names and values of fields: the first field of that name gets
--       the value, where there is none it is added at the end
-- Reply for each item DONE, NOT_PENDING, ANOTHERS, GONE, {COPIED, text} or {REFUSED, text}
-- Promise: as copy. An entry deleted meanwhile is acknowledged and GONE.

local MOST = 7990

local err = unusable()
if err then return err end

local outcomes = {}
local at = 3
while at < #ARGV do
  local id, consumer = ARGV[at], ARGV[at + 1]
  local first = at + 3
  local last = first + tonumber(ARGV[at + 2]) - 1
  at = last + 1

  local outcome
  local owner = owner_of(id)
  if not owner then
    outcome = NOT_PENDING
  elseif owner ~= consumer then
    outcome = ANOTHERS
  else
    local entry = redis.call('XRANGE', KEYS[1], id, id)[1]
    if not entry then
      local refused = take(id)
      outcome = refused and {REFUSED, refused} or GONE
    else
      local fields = entry[2]
      for i = first, last, 2 do
        local place = #fields + 1
        for j = 1, #fields, 2 do
          if fields[j] == ARGV[i] then
            place = j
            break
          end
        end
        fields[place], fields[place + 1] = ARGV[i], ARGV[i + 1]
      end
      local refused
      if #fields > MOST then
        refused = 'ERR the entry has more fields than a script can copy'
      else
        refused = failed(redis.pcall('XADD', KEYS[1], '*', unpack(fields)))
      end
      if refused then
        if not_primary(refused) then return redis.error_reply(refused) end
        outcome = {REFUSED, refused}
      else
        refused = take(id)
        outcome = refused and {COPIED, refused} or DONE
      end
    end
  end
  outcomes[#outcomes + 1] = outcome
end
return outcomes
