#!lua flags=no-writes
-- inspect.lua reads the states of some checks at one instant, and writes nothing:
-- what they mean is worked out by limit/inspect.go.
--
-- The call is as each in common.lua says, and of an inspection
-- keys  1..n  the states of the checks
-- args  2     how many leases of a concurrency limit are told, at most
--       then, for each key, its kind: b (token bucket), w (window), s (sliding window),
--       c (concurrency)
--
-- The reply is {now (ms), then for each key
--   b: {level (units), capacity, scale, refill, time (ms)}, or {} without state
--   w: {start (ms), count}, or {} without state
--   s: {start (ms), count, the count of the window before}, or {} without state
--   c: {live leases, then for each of those that expire first: token, expiry (ms)}}.

-- include common.lua

-- The first fields of a state: a later version may have written more.
local function unpack_fields(packed, fields)
  local state = {cmsgpack.unpack(packed)}
  check_format(state[1])
  for i = 2, 1 + fields do
    if type(state[i]) ~= 'number' then error('weir: broken state') end
  end
  return {unpack(state, 2, 1 + fields)}
end

local FIELDS = {b = 5, w = 2, s = 3}

local function inspect(at, ...)
  local args = list(...)
  local reply = {now}
  for i = 1, args[1] do
    local key = KEYS[at + i]
    local kind, state = args[i + 2], {}
    if kind == 'c' then
      local live = string.format('(%.0f', now)
      state[1] = call('ZCOUNT', key, live, '+inf')
      for j, part in ipairs(call('ZRANGE', key, live, '+inf', 'BYSCORE', 'LIMIT', 0, args[2], 'WITHSCORES')) do
        state[j + 1] = j % 2 == 0 and tonumber(part) or part
      end
    else
      local packed = call('GET', key)
      if packed then state = unpack_fields(packed, FIELDS[kind]) end
    end
    reply[i + 1] = state
  end
  return reply
end

return each(inspect)
