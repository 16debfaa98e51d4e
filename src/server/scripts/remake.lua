-- Looks after a group that disappeared.
--
-- KEYS  1 stream
-- ARGV  1 group, 2 'keep', 3 the mark: the last id that the group is known to have delivered,
--       4 the highest of the mark and the ids in hand, 5 '1' if this process saw the group missing
-- Reply {FOLLOWED, RAISED, MADE or RESTARTED, the group's last delivered id}
-- Promise: nothing that the group may not have delivered is skipped. Sending it again changes nothing more.

local FOLLOWED, RAISED, MADE, RESTARTED = 0, 1, 2, 3

-- The first of a flat list of names and values.
local function value_of(list, name)
  for i = 1, #list, 2 do
    if list[i] == name then return list[i + 1] end
  end
end

local stream = redis.pcall('XINFO', 'STREAM', KEYS[1])
local err = failed(stream)
-- "ERR no such key": there is no stream.
if err and not string.find(err, 'no such key', 1, true) then return redis.error_reply(err) end

local last = not err and value_of(stream, 'last-generated-id')
-- Ids that reach the mark: it is the stream that was read before.
local same = last and not after(ARGV[3], last)

if last then
  for _, group in ipairs(redis.call('XINFO', 'GROUPS', KEYS[1])) do
    if value_of(group, 'name') == ARGV[1] then
      local delivered = value_of(group, 'last-delivered-id')
      if ARGV[5] == '1' and same and after(ARGV[3], delivered) then
        redis.call('XGROUP', 'SETID', KEYS[1], ARGV[1], ARGV[3])
        return {RAISED, ARGV[3]}
      end
      return {FOLLOWED, delivered}
    end
  end
end

local start, action = '0-0', RESTARTED
if same then
  start, action = ARGV[4], MADE
  -- Beyond the stream's end there may be entries yet to come.
  if after(start, last) then start = last end
end
local made = failed(redis.pcall('XGROUP', 'CREATE', KEYS[1], ARGV[1], start, 'MKSTREAM'))
if made then return redis.error_reply(made) end
return {action, start}
