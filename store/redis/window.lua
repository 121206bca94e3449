-- window.lua is the arithmetic of windows: limit/window.go, line for line.

-- WindowState.At. The state of a window is {format, start (ms), count} and, of a sliding one,
-- the count of the window before: previous, which is nil of a fixed one.
local function window_at(packed, length, sliding)
  local start = now - fmod(now, length)
  local state = {start = start, count = 0, previous = sliding and 0 or nil, write = false, charged = false, reserved = false}
  if packed then
    local start0, count0, previous0 = unpack_state(packed)
    if start <= start0 then
      state.start, state.count = start0, count0
      if sliding then state.previous = previous0 end
    elseif sliding and start == start0 + length then
      state.previous = count0
    end
  end
  return state
end

local function pack_window(start, count, previous)
  if previous then return pack_state(start, count, previous) end
  return pack_state(start, count)
end
