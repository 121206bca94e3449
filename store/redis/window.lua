-- window.lua is the arithmetic of windows: limit/window.go, line for line.

-- The fields of a window while it is worked with; PREVIOUS is nil of a fixed one. The first three, for
-- decide.lua, are those of every state: it is to be written, it has been charged, reserved.
local WRITE, CHARGED, RESERVED, START, COUNT, PREVIOUS = 1, 2, 3, 4, 5, 6

-- WindowState.At. The state of a window is {format, start (ms), count} and, of a sliding one,
-- the count of the window before: previous, which is nil of a fixed one.
local function window_at(packed, length, sliding)
  local start = now - fmod(now, length)
  local state = {false, false, false, start, 0, sliding and 0 or nil}
  if packed then
    local start0, count0, previous0 = unpack_state(packed)
    if start <= start0 then
      state[START], state[COUNT] = start0, count0
      if sliding then state[PREVIOUS] = previous0 end
    elseif sliding and start == start0 + length then
      state[PREVIOUS] = count0
    end
  end
  return state
end

local function pack_window(start, count, previous)
  if previous then return pack_state(start, count, previous) end
  return pack_state(start, count)
end
