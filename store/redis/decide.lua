#!lua
-- decide.lua decides all checks of one request at one instant: all that passed
-- are charged, or none is. The arithmetic is limit/state.go, line for line; all
-- numbers are whole and below 2^53, so doubles hold them exactly.
--
-- KEYS  1..n       the states of the checks, each once
--       n+1, n+2   the lease's record and the domain's index of leases; only
--                  with a lease
-- ARGV  1          now, ms since the epoch; "" in production: Redis TIME
--       2          the lease's token; "" without a lease
--       then 7 a check:
--         kind     b (token bucket), w (window) or c (concurrency)
--         key      index into KEYS
--         hits     -2^53 < hits < 2^53; negative refunds
--         mode     "" enforced, "s" shadow, else a quota group
--         b:       capacity (tokens), scale (units a token), refill (units a ms)
--         w:       max (hits), length (ms), "1" to charge it when over, else "0"
--         c:       max (slots), life of a lease (ms), name of the limit
--
-- Returns {admitted (1, 0), leases found expired, life of the lease (ms; 0: no
-- lease), then 4 a check: passed (1, 0), remaining, retry after (ms), reset
-- after (ms)}.
--
-- Everything is read and evaluated before the first write, and every write is
-- one that cannot fail, since an error does not roll back.

local REAP = 64 -- expired members removed a call, at most

local token = ARGV[2]
local checks = (#ARGV - 2) / 7

-- What a later version wrote behind the fields that are known is left out.
local function unpack_state(packed)
  local format, a, b, c, d, e = cmsgpack.unpack(packed)
  check_format(format)
  return a, b, c, d, e
end

-- BucketState.At
local function bucket_at(packed, capacity, scale, refill)
  local full = capacity * scale
  local next = {level = full, capacity = capacity, scale = scale, refill = refill, millis = now, write = false}
  if not packed then return next end
  local level, capacity0, scale0, refill0, millis0 = unpack_state(packed)
  next.write = scale ~= scale0 or refill ~= refill0 or capacity ~= capacity0
  next.millis = max(now, millis0)
  local full0 = capacity0 * scale0
  local elapsed = min(next.millis - millis0, ceil_div(full0 - level, refill0))
  level = min(full0, level + elapsed * refill0)
  if level == full0 then return next end
  if scale ~= scale0 then
    local fraction = fmod(level, scale0)
    if fraction < 0 then fraction = fraction + scale0 end
    local tokens = (level - fraction) / scale0
    if tokens >= capacity then
      level = full
    else
      level = tokens * scale
      if fraction * scale <= MAX_EXACT then level = level + floor_div(fraction * scale, scale0) end
    end
  end
  next.level = min(full, level)
  return next
end

-- WindowState.At
local function window_at(packed, length)
  local start = now - fmod(now, length)
  if packed then
    local start0, count0 = unpack_state(packed)
    if start <= start0 then return {start = start0, count = count0, write = false} end
  end
  return {start = start, count = 0, write = false}
end

local expired, budget = 0, REAP
local reaped = {} -- key: how many of its members expired

-- Counts the members of a set, all and the expired; at most the budget of these
-- are removed later.
local function count(key)
  local all = redis.call('ZCARD', key)
  if all == 0 then return 0, 0, 0 end
  local ended = redis.call('ZCOUNT', key, '-inf', now)
  local found = min(ended, budget)
  budget = budget - found
  if found > 0 then reaped[key] = found end
  return all, ended, found
end

-- Read and evaluate.
local states, check = {}, {}
local index, listed = KEYS[#KEYS], 0
if token ~= '' then
  -- A release has overtaken this call: whoever asked has given it up.
  if redis.call('EXISTS', KEYS[#KEYS - 1]) == 1 then return redis.error_reply('WEIR given up') end
  local all, _, found = count(index)
  listed, expired = all - found, found
end
local refused, groups, grouped = false, {}, false
for i = 1, checks do
  local a = 3 + (i - 1) * 7
  local c = {
    kind = ARGV[a], key = KEYS[tonumber(ARGV[a + 1])], hits = tonumber(ARGV[a + 2]), mode = ARGV[a + 3],
    x = tonumber(ARGV[a + 4]), y = tonumber(ARGV[a + 5]), z = ARGV[a + 6],
  }
  check[i] = c
  local state = states[c.key]
  if c.kind == 'b' then
    if not state then state = bucket_at(redis.call('GET', c.key), c.x, c.y, tonumber(c.z)) end
    c.passed = c.hits < 0 or c.hits <= c.x and state.level >= c.hits * c.y
  elseif c.kind == 'w' then
    if not state then state = window_at(redis.call('GET', c.key), c.y) end
    c.passed = c.hits < 0 or c.x > 0 and c.hits <= c.x and state.count + c.hits <= c.x
  else
    if not state then
      local all, ended, found = count(c.key)
      state = {live = all - ended, kept = all - found}
    end
    c.passed = c.hits < 0 or state.live < c.x
  end
  states[c.key] = state
  if c.mode == '' then
    refused = refused or not c.passed
  elseif c.mode ~= 's' then
    grouped = true
    groups[c.mode] = groups[c.mode] or not c.passed
  end
end
if grouped and not refused then
  refused = true
  for _, over in pairs(groups) do refused = refused and over end
end

-- Charge, each state once.
local life = nil
for i = 1, checks do
  local c = check[i]
  local state = states[c.key]
  local over = c.kind == 'w' and c.z == '1' and c.mode ~= 's' and not c.passed
  if over or c.passed and not refused then
    if c.kind == 'b' then
      local hits = max(c.hits, -floor_div(MAX_EXACT, c.y))
      if hits ~= 0 and not state.charged then
        state.level = min(c.x * c.y, state.level - hits * c.y)
        state.write, state.charged = true, true
      end
    elseif c.kind == 'w' then
      if c.hits ~= 0 and not state.charged then
        state.count = min(MAX_EXACT, max(0, state.count + c.hits))
        state.write, state.charged = true, true
      end
    elseif c.hits >= 0 and not state.charged then
      state.live, state.charged = state.live + 1, true
      life = min(life or c.y, c.y)
    end
  end
end

-- Write.
for key, n in pairs(reaped) do redis.call('ZREMRANGEBYRANK', key, 0, n - 1) end
-- A set has had an expiry since its first member.
local function keep(key, ms, members)
  if members == 0 then
    redis.call('PEXPIRE', key, ms)
  else
    redis.call('PEXPIRE', key, ms, 'GT')
  end
end
local record = life and {WRITES, life, now, now + life}
local reply = {refused and 0 or 1, expired, life or 0}
for i = 1, checks do
  local c = check[i]
  local state = states[c.key]
  local remaining, retry, reset = 0, 0, 0
  if c.kind == 'b' then
    local ahead, full = state.millis - now, c.x * c.y
    reset = ahead + ceil_div(full - state.level, tonumber(c.z))
    if state.write then
      redis.call('SET', c.key, cmsgpack.pack(WRITES, state.level, c.x, c.y, tonumber(c.z), state.millis), 'PX', reset + SLACK)
      state.write = false
    end
    if state.level > 0 then remaining = floor_div(state.level, c.y) end
    if not c.passed and c.hits <= c.x then retry = ahead + ceil_div(max(0, c.hits * c.y - state.level), tonumber(c.z)) end
  elseif c.kind == 'w' then
    reset = state.start + c.y - now
    if state.write then
      redis.call('SET', c.key, cmsgpack.pack(WRITES, state.start, state.count), 'PX', reset + SLACK)
      state.write = false
    end
    remaining = max(0, c.x - state.count)
    if not c.passed and c.x > 0 and c.hits <= c.x then retry = reset end
  else
    if state.charged and not state.held then
      redis.call('ZADD', c.key, now + life, token)
      keep(c.key, life + SLACK, state.kept)
      record[#record + 1] = c.key
      record[#record + 1] = c.z
      state.held = true
    end
    remaining = max(0, c.x - state.live)
  end
  local r = #reply
  reply[r + 1], reply[r + 2], reply[r + 3], reply[r + 4] = c.passed and 1 or 0, remaining, retry, reset
end
if life then
  redis.call('SET', KEYS[#KEYS - 1], cmsgpack.pack(unpack(record)), 'PX', life + RECORD_SLACK)
  redis.call('ZADD', index, now + life, token)
  keep(index, life + INDEX_SLACK, listed)
end
return reply
