-- Stands before every script that goes on after an error.

-- The text of an error, without the place in the script that 6.2 puts before it.
local function text_of(reply)
  local text = string.gsub(reply.err, '^@user_script: ?%d+: ?%-?', '')
  return (string.gsub(text, '[\r\n]+', ' '))
end

-- The error reply of a call, if it failed.
local function failed(reply)
  return type(reply) == 'table' and reply.err and text_of(reply)
end

