#!lua
-- charge.lua charges what a stream has used, once for each of its limits, whether or
-- not that much is left. The arithmetic is limit/state.go, line for line.
--
-- KEYS  1..n  the states of the checks, each once
--       n+1   those that the stream's usage was charged to, and how long (ms) that
--             is remembered
-- ARGV  1     now, ms since the epoch; "" in production: Redis TIME
--       then 6 a check:
--         kind  b (token bucket) or w (window)
--         key   index into KEYS
--         hits  -2^53 < hits < 2^53; negative refunds
--         b:    capacity (tokens), scale (units a token), refill (units a ms)
--         w:    length (ms), "0", "0"
--
-- Returns for each check whether it was charged now (1, 0).

local USAGE_LIFE = 600000

-- Read and evaluate.
local mark = KEYS[#KEYS]
local charges, reply, seen = {}, {}, {}
for i = 1, (#ARGV - 1) / 6 do
  local a = 2 + (i - 1) * 6
  local key, hits = KEYS[tonumber(ARGV[a + 1])], tonumber(ARGV[a + 2])
  reply[i] = 0
  if not seen[key] and tonumber(redis.call('ZSCORE', mark, key) or 0) <= now then
    seen[key], reply[i] = true, 1
    local packed = redis.call('GET', key)
    if ARGV[a] == 'b' then
      local capacity, scale, refill = tonumber(ARGV[a + 3]), tonumber(ARGV[a + 4]), tonumber(ARGV[a + 5])
      local state = bucket_at(packed, capacity, scale, refill)
      -- BucketState.Debit
      local full, deepest = capacity * scale, capacity * scale - (MAX_EXACT - refill)
      local level, most = deepest, floor_div(MAX_EXACT, scale)
      if hits < -most then level = full elseif hits <= most then level = max(deepest, min(full, state.level - hits * scale)) end
      charges[#charges + 1] = {key, cmsgpack.pack(WRITES, level, capacity, scale, refill, state.millis),
        state.millis - now + ceil_div(capacity * scale - level, refill) + SLACK}
    else
      local length = tonumber(ARGV[a + 3])
      local state = window_at(packed, length)
      local count = min(MAX_EXACT, max(0, state.count + hits))
      charges[#charges + 1] = {key, cmsgpack.pack(WRITES, state.start, count), state.start + length - now + SLACK}
    end
  end
end

-- Write.
for _, c in ipairs(charges) do
  redis.call('SET', c[1], c[2], 'PX', c[3])
  redis.call('ZADD', mark, now + USAGE_LIFE, c[1])
end
if #charges > 0 then redis.call('PEXPIRE', mark, USAGE_LIFE) end
return reply
