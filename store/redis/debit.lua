-- debit.lua stands in the scripts that charge what is known afterwards, behind common.lua.
-- Each function returns what debited writes: all is read before anything is written.

-- BucketState.Debit, for the state under key, which has this level
local function debit_bucket(key, level, millis, capacity, scale, refill, hits)
  local full, deepest = capacity * scale, capacity * scale - (MAX_EXACT - refill)
  local most = floor_div(MAX_EXACT, scale)
  if hits < -most then level = full
  elseif hits > most then level = deepest
  else level = max(deepest, min(full, level - hits * scale)) end
  return {key, pack_state(level, capacity, scale, refill, millis), millis - now + ceil_div(full - level, refill) + SLACK}
end

-- The same under the limit that the state was written by, packed, or if there is none under this
-- one: a change is the next decision's. Nil if nothing is to be written: one that is full is as
-- one without state, and has nothing to be given back.
local function debit_own_bucket(key, packed, capacity, scale, refill, hits)
  if packed then
    local _, capacity0, scale0, refill0 = unpack_state(packed)
    local level, millis = bucket_at(packed, capacity0, scale0, refill0)
    if level < capacity0 * scale0 then
      if hits == 0 then return nil end
      return debit_bucket(key, level, millis, capacity0, scale0, refill0, hits)
    end
  end
  if hits <= 0 then return nil end
  return debit_bucket(key, capacity * scale, now, capacity, scale, refill, hits)
end

local function write_of_window(key, state, length)
  local reset = state[START] + length - now -- WindowState.ResetAfterMillis
  if state[PREVIOUS] and state[COUNT] > 0 then reset = reset + length end
  return {key, pack_window(state[START], state[COUNT], state[PREVIOUS]), reset + SLACK}
end

-- WindowState.Charge
local function debit_window(key, state, length, hits)
  local count = state[COUNT] + hits
  state[COUNT] = min(MAX_EXACT, max(0, count))
  if state[PREVIOUS] then state[PREVIOUS] = max(0, state[PREVIOUS] + min(0, count)) end
  return write_of_window(key, state, length)
end

-- WindowState.Settle; nil if the window that began at start does not count any more
local function settle_window(key, state, length, start, difference)
  if start == state[START] then
    state[COUNT] = min(MAX_EXACT, max(0, state[COUNT] + difference))
  elseif state[PREVIOUS] and start == state[START] - length then
    state[PREVIOUS] = min(MAX_EXACT, max(0, state[PREVIOUS] + difference))
  else
    return nil
  end
  return write_of_window(key, state, length)
end

local function debited(debits)
  for _, d in ipairs(debits) do write(d[1], d[2], d[3]) end
end
