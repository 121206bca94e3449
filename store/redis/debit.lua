-- debit.lua stands in the scripts that charge what is known afterwards, behind common.lua.
-- Each function returns what debited writes: all is read before anything is written.

-- BucketState.Debit, for the state under key at now
local function debit_bucket(key, state, capacity, scale, refill, hits)
  local full, deepest = capacity * scale, capacity * scale - (MAX_EXACT - refill)
  local level, most = deepest, floor_div(MAX_EXACT, scale)
  if hits < -most then level = full elseif hits <= most then level = max(deepest, min(full, state.level - hits * scale)) end
  return {key, cmsgpack.pack(WRITES, level, capacity, scale, refill, state.millis),
    state.millis - now + ceil_div(full - level, refill) + SLACK}
end

-- WindowState.Charge
local function debit_window(key, state, length, hits)
  local count = min(MAX_EXACT, max(0, state.count + hits))
  return {key, cmsgpack.pack(WRITES, state.start, count), state.start + length - now + SLACK}
end

local function debited(debits)
  for _, d in ipairs(debits) do redis.call('SET', d[1], d[2], 'PX', d[3]) end
end
