-- common.lua stands in every script, behind its first line.
--
-- KEYS  of the first item of the call, and then of the next
-- ARGV  1      now, ms since the epoch; "" in production: Redis TIME
--       2..n   an item each, an array in MessagePack: how many of KEYS are its own, and its
--              arguments
--
-- Returns for each item its reply, an array in MessagePack, or its error, a string. Items are as calls
-- one after the other, at one instant; one that fails changes nothing of the others'.

-- The formats of states that are read, up to READS, and the one that is written:
-- docs/decisions/0007-state-formats.md.
local READS, WRITES = 1, 1
local MAX_EXACT = 9007199254740991 -- 2^53 - 1
local SLACK = 10000                -- ms that a key outlives its meaning
local RECORD_SLACK = 60000         -- ms that a lease's record outlives the lease
local RESERVED_SLACK = 3600000     -- the same while something that it reserved is not settled
local STREAM_SLACK = 86400000      -- ms that a stream is known after its lease, while the same
local INDEX_SLACK = 3600000        -- ms that the index waits to be cleaned

-- What is known of a stream: {format, kind, until (ms), token of its lease}. From
-- then on nothing is known. Of an operation also: what was asked, the latest attempt, and
-- how often it was told of its lease again.
local HOLDING, ENDED, AMBIGUOUS, TOMBSTONE, LINGERING = 1, 2, 3, 4, 5

local min, max, fmod = math.min, math.max, math.fmod
local call, pack = redis.call, cmsgpack.pack

local now = tonumber(ARGV[1])
if not now then
  local time = call('TIME')
  now = time[1] * 1000 + math.floor(time[2] / 1000)
end

-- a / b for 0 <= a, 0 < b; both exact, where a floor of the quotient is not.
local function floor_div(a, b) return (a - fmod(a, b)) / b end
local function ceil_div(a, b)
  local r = fmod(a, b)
  if r > 0 then return (a - r) / b + 1 end
  return a / b
end

local function check_format(format)
  format = tonumber(format) or 0
  if format < 1 or format > READS then error('weir: state of format ' .. format .. ', and only 1 to ' .. READS .. ' is known') end
end

-- The kind of what is known of a stream or an operation, nil for nothing; until; token;
-- and the rest.
local function known_at(key)
  local packed = call('GET', key)
  if not packed then return nil, 0, '' end
  local format, kind, till, token, body, attempt, told = cmsgpack.unpack(packed)
  check_format(format)
  if till <= now then return nil, 0, '' end
  return kind, till, token, body, attempt, told
end

local function know(key, kind, till, ...)
  call('SET', key, pack(WRITES, kind, till, ...), 'PX', till - now)
end

-- The record of a lease is {format, life (ms), when it was granted, when it expires or has
-- ended, until when the record means something (ms all), HOLDING, LINGERING or ENDED, the
-- keys of its stream and its operation ("" for none), how many slots it has, and then
--   key, name of the limit, linger (ms)                   of each slot
--   key, name of the limit, hits, settled (1, 0), x, y, z of each reservation: a bucket's
--     capacity, scale and refill; or a window's length (ms) and start, and 0 if it is
--     fixed, -1 if it is sliding;
-- and, if time had been set back when it was granted, the starts of the windows, by key, that it
-- was charged to and that began later. A map, as what a later version writes.
local GRANTED, EXPIRY, UNTIL, STATE, STREAM, OPERATION, SLOTS = 3, 4, 5, 6, 7, 8, 9

-- The record of a lease, if it means something, where its reservations begin, and the last
-- of their fields. What a later version wrote behind them is no text.
local function record_at(key)
  local packed = call('GET', key)
  if not packed then return nil, 0, -1 end
  local record = {cmsgpack.unpack(packed)}
  check_format(record[1])
  if record[UNTIL] <= now then return nil, 0, -1 end
  local first = SLOTS + 1 + 3 * record[SLOTS]
  local last = first - 1
  while type(record[last + 1]) == 'string' do last = last + 7 end
  return record, first, last
end

local function write_record(key, record)
  call('SET', key, pack(unpack(record)), 'PX', record[UNTIL] - now)
end

-- What a later version wrote behind the fields that are known is left out.
local function unpack_state(packed)
  local format, a, b, c, d, e = cmsgpack.unpack(packed)
  check_format(format)
  return a, b, c, d, e
end

-- BucketState.At
local function bucket_at(packed, capacity, scale, refill)
  local full, deepest = capacity * scale, capacity * scale - (MAX_EXACT - refill)
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
    elseif tokens < deepest / scale - 1 then
      level = deepest
    else
      level = tokens * scale
      if fraction * scale <= MAX_EXACT then level = level + floor_div(fraction * scale, scale0) end
    end
  end
  next.level = max(deepest, min(full, level))
  return next
end

-- WindowState.At. The state of a window is {format, start (ms), count} and, of a sliding one,
-- the count of the window before: previous, which is nil of a fixed one.
local function window_at(packed, length, sliding)
  local start = now - fmod(now, length)
  local state = {start = start, count = 0, write = false}
  if sliding then state.previous = 0 end
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

-- Runs run(keys, args) for each item; args[1] is how many keys it has.
local function each(run)
  local replies, from = {}, 0
  for i = 2, #ARGV do
    local args = cmsgpack.unpack(ARGV[i])
    local keys, n = {}, args[1]
    for k = 1, n do keys[k] = KEYS[from + k] end
    from = from + n
    local ok, reply = pcall(run, keys, args)
    if not ok then
      -- An error of Redis' own begins with its code.
      reply = type(reply) == 'table' and reply.err or tostring(reply)
      if not string.find(reply, '^%u+ ') then reply = 'ERR ' .. reply end
    end
    replies[i - 1] = pack(reply)
  end
  return replies
end
