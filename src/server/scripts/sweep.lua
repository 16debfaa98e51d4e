-- Moves what is due from a delay set back to its stream.
--
-- KEYS  1 delay set, 2 stream, 3 where unreadable members go
-- ARGV  1 how many to move at most, 2 how long the set outlives its last entry in ms, or '' for ever
-- Reply {moved, unreadable, how late the oldest one was in ms, ms until the next one is due or -1, error}
-- Promise: copies first, removal last, in one step, so any number of processes may sweep. A member that
--       cannot be read blocks nothing. What the stream refuses stays in the set, and so does all behind it.
--       Sending it again moves only what is still there.

local VERSION, MOST = 1, 7990

-- The fields of a member, or nil. Unpacking garbage succeeds more often than not, so everything is checked.
local function fields_of(member)
  local unpacked = {pcall(cmsgpack.unpack, member)}
  local parts = unpacked[2]
  if not unpacked[1] or #unpacked ~= 2 or type(parts) ~= 'table' then return nil end
  local n = #parts
  if parts[1] ~= VERSION or type(parts[2]) ~= 'string' or type(parts[3]) ~= 'string' then return nil end
  if type(parts[4]) ~= 'number' or n < 6 or n % 2 == 1 or n > MOST + 4 then return nil end
  local fields = {}
  for i = 5, n do
    if type(parts[i]) ~= 'string' then return nil end
    fields[i - 4] = parts[i]
  end
  return fields
end

local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
local due = redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', string.format('%.0f', now), 'WITHSCORES', 'LIMIT', 0, ARGV[1])
local removed, moved, unreadable, late, refused = {}, 0, 0, 0, ''
if #due > 0 then
  -- Two calls that change nothing. The first asks whether the stream takes entries at all just now: only the
  -- first write of a script is held to the memory limit. The second asks whether this user may remove: a
  -- copy whose original stays would be made again by every sweep.
  refused = failed(redis.pcall('XADD', KEYS[2], 'NOMKSTREAM', '0-0', 'f', 'v')) or ''
  if string.find(refused, 'must be greater', 1, true) then
    refused = failed(redis.pcall('ZREM', KEYS[1], 'streamvisor: may this user remove?')) or ''
  end
end
for i = 1, #due, 2 do
  if refused ~= '' then break end
  local member, score = due[i], tonumber(due[i + 1])
  local fields = fields_of(member)
  if fields then
    refused = failed(redis.pcall('XADD', KEYS[2], '*', unpack(fields))) or ''
    if refused == '' then moved = moved + 1 end
  else
    refused = failed(redis.pcall('ZADD', KEYS[3], due[i + 1], member)) or ''
    if refused == '' then unreadable = unreadable + 1 end
  end
  if refused == '' then
    late = math.max(late, now - score)
    removed[#removed + 1] = member
  end
end
if #removed > 0 then redis.call('ZREM', KEYS[1], unpack(removed)) end
if string.sub(refused, 1, 8) == 'READONLY' then return redis.error_reply(refused) end

local next_due = -1
local first = redis.call('ZRANGE', KEYS[1], 0, 0, 'WITHSCORES')[2]
if first then
  next_due = math.max(0, math.ceil(tonumber(first) - now))
  if ARGV[2] ~= '' then
    local latest = redis.call('ZRANGE', KEYS[1], -1, -1, 'WITHSCORES')[2]
    redis.pcall('PEXPIREAT', KEYS[1], string.format('%.0f', math.max(now, tonumber(latest)) + tonumber(ARGV[2])))
  end
end
return {moved, unreadable, math.floor(late), next_due, refused}
