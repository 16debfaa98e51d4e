-- Stands before the scripts that take pending entries over.

-- Takes entries for a consumer, whoever has them. `wanted` lists {id, count, idle}; the count stays what
-- is given there. Returns a list of {id, fields, count, idle} in the same order, and the ids of those that
-- were deleted, which are no longer pending then. Not every server says which ones those are (6.2 sends
-- nils, later ones leave them out), so they are what is missing.
local function claim(consumer, wanted)
  local by_count = {}
  for _, entry in ipairs(wanted) do
    local ids = by_count[entry[2]]
    if not ids then
      ids = {}
      by_count[entry[2]] = ids
    end
    ids[#ids + 1] = entry[1]
  end
  local fields = {}
  for count, ids in pairs(by_count) do
    local args = {KEYS[1], ARGV[1], consumer, 0}
    for _, id in ipairs(ids) do args[#args + 1] = id end
    args[#args + 1] = 'RETRYCOUNT'
    args[#args + 1] = count
    local taken = redis.call('XCLAIM', unpack(args))
    for i = 1, #taken do
      if taken[i] and taken[i][2] then fields[taken[i][1]] = taken[i][2] end
    end
  end
  local entries, gone = {}, {}
  for _, entry in ipairs(wanted) do
    local id = entry[1]
    if fields[id] then
      entries[#entries + 1] = {id, fields[id], entry[2], entry[3]}
    else
      redis.call('XACK', KEYS[1], ARGV[1], id)
      gone[#gone + 1] = id
    end
  end
  return entries, gone
end

