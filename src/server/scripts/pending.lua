-- Stands before every script that looks at pending entries; KEYS[1] is the stream, ARGV[1] the group.

-- What to end the script with where the group cannot be looked at; else nil. The server's own NOGROUP
-- repeats the key and the group, which may be any bytes, while clients take errors for text.
local function unusable()
  local err = failed(redis.pcall('XPENDING', KEYS[1], ARGV[1], '0-0', '0-0', 1))
  if not err then return nil end
  if string.find(err, 'NOGROUP', 1, true) then err = 'NOGROUP the consumer group does not exist' end
  return redis.error_reply(err)
end

-- The consumer that an entry is pending for, how long it has been idle and how often it was delivered;
-- nil when it is pending for nobody.
local function owner_of(id)
  local found = redis.call('XPENDING', KEYS[1], ARGV[1], id, id, 1)[1]
  if found then return found[2], found[3], found[4] end
end

local function exists(id)
  return #redis.call('XRANGE', KEYS[1], id, id) > 0
end

