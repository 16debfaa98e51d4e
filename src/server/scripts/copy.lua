-- Puts copies of entries into a stream or a delay set, each together with the acknowledgement of its
-- original: retries, delayed retries and dead letters.
--
-- KEYS  1 stream, 2 where the copies go
-- ARGV  1 group, 2 'keep', 'xackdel' or 'xdel' (see take), 3 'stream' or 'delay',
--       4 how long a delay set outlives its last entry in ms, or '' for ever, then for each item:
--       id, consumer, '1' if its copy was made before, delay in ms, attempt, number of strings, strings
-- Reply for each item DONE, NOT_PENDING, ANOTHERS, {COPIED, text} or {REFUSED, text}
-- Promise: a copy is made only while the original is pending for the consumer named, and before it is
--       acknowledged. Sending it again makes no second copy. A refused copy leaves the original pending.

local err = unusable()
if err then return err end

local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
local delayed = false

local function copy(id, delay, attempt, first, last)
  if ARGV[3] == 'stream' then return redis.pcall('XADD', KEYS[2], '*', unpack(ARGV, first, last)) end
  -- One entry has one copy per group: its id and the group make the member unique and the step repeatable.
  local member = {1, id .. ' ' .. ARGV[1], ARGV[1], tonumber(attempt)}
  for i = first, last do member[#member + 1] = ARGV[i] end
  local due = string.format('%.0f', now + tonumber(delay))
  local reply = redis.pcall('ZADD', KEYS[2], 'NX', due, cmsgpack.pack(member))
  delayed = delayed or not failed(reply)
  return reply
end

local outcomes = {}
local at = 5
while at < #ARGV do
  local id, consumer, copied, delay, attempt = ARGV[at], ARGV[at + 1], ARGV[at + 2] == '1', ARGV[at + 3], ARGV[at + 4]
  local first = at + 6
  local last = first + tonumber(ARGV[at + 5]) - 1
  at = last + 1

  local outcome
  -- Where the copy stands already, the original must go, whoever has it by now.
  local owner = not copied and owner_of(id)
  if not copied and not owner then
    outcome = NOT_PENDING
  elseif not copied and owner ~= consumer then
    outcome = ANOTHERS
  else
    local refused = not copied and failed(copy(id, delay, attempt, first, last))
    if refused then
      if not_primary(refused) then return redis.error_reply(refused) end
      outcome = {REFUSED, refused}
    else
      refused = take(id)
      outcome = refused and {COPIED, refused} or DONE
    end
  end
  outcomes[#outcomes + 1] = outcome
end

if delayed then
  local latest = redis.call('ZRANGE', KEYS[2], -1, -1, 'WITHSCORES')[2]
  if latest and ARGV[4] ~= '' then
    local expiry = math.max(now, tonumber(latest)) + tonumber(ARGV[4])
    redis.pcall('PEXPIREAT', KEYS[2], string.format('%.0f', expiry))
  elseif latest then
    redis.pcall('PERSIST', KEYS[2])
  end
end
return outcomes
