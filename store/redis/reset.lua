#!lua flags=allow-oom
-- reset.lua forgets the states of some checks at one instant. The leases that hold slots of
-- them are left as they are: what they held is free.
--
-- The call is as each in common.lua says, and of a reset
-- keys  1..n  the states of the checks
-- args  then 2 for each key:
--         kind    b (token bucket), w (window), s (sliding window) or c (concurrency)
--         length  of a window (ms); else 0
--
-- The reply is {1}. A key is read and written once, but a set of slots is freed as a whole: some
-- 10,000 a ms, unless lazyfree-lazy-user-del is on.

-- include common.lua
-- include window.lua

local function reset(at, ...)
  local args = list(...)
  -- Read.
  local windows, gone = {}, {}
  for i = 1, args[1] do
    local key = KEYS[at + i]
    local kind, length = args[2 * i], args[2 * i + 1]
    if kind == 'w' or kind == 's' then
      local packed = call('GET', key)
      -- WindowState.Reset: its windows can still be settled in.
      if packed then windows[#windows + 1] = {key, window_at(packed, length, kind == 's')[START], kind == 's'} end
    else
      gone[#gone + 1] = key
    end
  end

  -- Write.
  for _, w in ipairs(windows) do
    call('SET', w[1], w[3] and pack_state(w[2], 0, 0) or pack_state(w[2], 0), 'KEEPTTL')
  end
  for _, key in ipairs(gone) do call('DEL', key) end
  return {1}
end

return each(reset)
