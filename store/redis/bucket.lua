-- bucket.lua is the arithmetic of token buckets: limit/state.go, line for line.

-- BucketState.At: the level, its time (ms), and whether it is to be written since the limit has
-- changed.
local function bucket_at(packed, capacity, scale, refill)
  local full = capacity * scale
  if not packed then return full, now, false end
  local level, capacity0, scale0, refill0, millis0 = unpack_state(packed)
  local write = scale ~= scale0 or refill ~= refill0 or capacity ~= capacity0
  local full0, millis = capacity0 * scale0, max(now, millis0)
  local elapsed = min(millis - millis0, ceil_div(full0 - level, refill0))
  level = min(full0, level + elapsed * refill0)
  if level == full0 then return full, millis, write end
  if not write then return level, millis, false end
  local deepest = full - (MAX_EXACT - refill)
  if scale ~= scale0 then
    local fraction = fmod(level, scale0)
    if fraction < 0 then fraction = fraction + scale0 end
    local tokens = (level - fraction) / scale0
    if tokens >= capacity then
      level = full
    elseif tokens < deepest / scale - 1 then
      level = deepest
    else
      level = tokens * scale
      if fraction * scale <= MAX_EXACT then level = level + floor_div(fraction * scale, scale0) end
    end
  end
  return max(deepest, min(full, level)), millis, true
end
