-- Stands before the scripts that acknowledge; ARGV[2] says what becomes of what is acknowledged:
-- 'keep', 'xackdel' (8.2 and later: the server deletes it if no group needs it) or 'xdel' (this script
-- looks at the groups).

-- Whether id `a` comes after id `b`. The numbers have 64 bits, Lua's have 53: they are compared as text.
local function after(a, b)
  local a_ms, a_seq = string.match(a, '^(%d+)-(%d+)$')
  local b_ms, b_seq = string.match(b, '^(%d+)-(%d+)$')
  if a_ms == b_ms then a_ms, b_ms = a_seq, b_seq end
  if #a_ms ~= #b_ms then return #a_ms > #b_ms end
  return a_ms > b_ms
end

local groups

-- Whether any group has not had the entry yet or has it pending.
local function needed(id)
  if not groups then
    groups = {}
    for _, info in ipairs(redis.call('XINFO', 'GROUPS', KEYS[1])) do
      local group = {}
      for i = 1, #info, 2 do group[info[i]] = info[i + 1] end
      groups[#groups + 1] = {group['name'], group['last-delivered-id']}
    end
  end
  for _, group in ipairs(groups) do
    if after(id, group[2]) then return true end
    if #redis.call('XPENDING', KEYS[1], group[1], id, id, 1) > 0 then return true end
  end
  return false
end

-- Acknowledges an entry, and deletes it where that is asked and no group needs it. Returns the error if
-- the server refused the acknowledgement, else nil and whether it was pending.
local function take(id)
  local reply
  if ARGV[2] == 'xackdel' then
    reply = redis.pcall('XACKDEL', KEYS[1], ARGV[1], 'ACKED', 'IDS', 1, id)
  else
    reply = redis.pcall('XACK', KEYS[1], ARGV[1], id)
  end
  local err = failed(reply)
  if err then return err end
  if ARGV[2] == 'xackdel' then return nil, reply[1] ~= -1 end
  if ARGV[2] == 'xdel' and not needed(id) then redis.call('XDEL', KEYS[1], id) end
  return nil, reply == 1
end

-- Errors that no other item of the batch can escape either, and that a new connection may cure.
local function not_primary(err)
  return string.sub(err, 1, 8) == 'READONLY'
end

-- Outcomes of an item; the last two come with the server's text.
local DONE, NOT_PENDING, ANOTHERS, GONE, COPIED, REFUSED = 0, 1, 2, 3, 4, 5

