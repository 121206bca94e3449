#!lua
-- decide.lua decides all checks of one request at one instant: all that passed
-- are charged, or none is. The arithmetic is limit/state.go and window.go, line for line;
-- all numbers are whole and below 2^53, so doubles hold them exactly.
--
-- KEYS  1..n       the states of the checks, each once
--       n+1, n+2   the lease's record and the domain's index of leases; only
--                  with a lease
--       n+3        what is known of the stream or the operation; only with one
--       The record of the lease that an operation holds is in the same slot.
-- ARGV  1          now, ms since the epoch; "" in production: Redis TIME
--       2          the lease's token; "" without a lease
--       3          "s" with a stream, "o" with an operation, else ""
--       then, with an operation, what it asks, and the number of the attempt (0: none)
--       then 7 a check:
--         kind     b (token bucket), w (window), s (sliding window) or c (concurrency)
--         key      index into KEYS
--         hits     -2^53 < hits < 2^53; negative refunds
--         mode     "" enforced, "s" shadow, else a quota group
--         b:       capacity (tokens), scale (units a token), refill (units a ms)
--         w, s:    max (hits), length (ms), "1" to charge it when over, else "0"
--                  of these the last, if the limit reserves, then has a space, for how
--                  long (ms), a space and the name of the limit
--         c:       max (slots), life of a lease (ms), linger (ms), a space and the
--                  name of the limit
--
-- Returns {admitted (1; 0; 2: refused, since its stream had ended; 3: told again what the
-- operation holds), leases found expired, life of the lease (ms; 0: no lease), then 4 a
-- check: passed (1, 0), remaining, retry after (ms), reset after (ms)}; and if it was told
-- again the token of the lease. {4} if the operation asked for something else, {5} if
-- the attempt is late.
--
-- Everything is read and evaluated before the first write, and every write is
-- one that cannot fail, since an error does not roll back.

local REAP = 64 -- expired members removed a call, at most

local OPERATION_LIFE = 60000

local token = ARGV[2]
local from = ARGV[3] == 'o' and 6 or 4
local checks = (#ARGV - from + 1) / 7

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

-- What sliding windows need beyond fixed ones. It is made for those that meet one: a call
-- makes its functions anew, which all decisions would pay for.
local function sliding_windows()
  -- floor(count * part / length), for 0 <= part <= length < 2^35 and any count. The product
  -- may not be exact, so part is taken in two digits.
  local DIGIT = 262144 -- 2^18
  local function part_of(count, part, length)
    local rest, low = fmod(count, length), fmod(part, DIGIT)
    local a = rest * ((part - low) / DIGIT) -- < 2^52
    local ra = fmod(a, length)
    local b, c = ra * DIGIT, rest * low     -- < 2^53
    local rb, rc = fmod(b, length), fmod(c, length)
    local whole = (count - rest) / length * part + (a - ra) / length * DIGIT + (b - rb) / length + (c - rc) / length
    if rb + rc >= length then return whole + 1 end
    return whole
  end

  -- WindowState.Counted, of a sliding one
  local function counted(state, length)
    local passed = part_of(state.previous, max(0, now - state.start), length)
    return min(MAX_EXACT, state.count + (state.previous - passed))
  end

  -- leftFor: the quotient is below 2^35, so a double is off by 1 at most, which part_of tells.
  local function left_for(previous, room, length)
    local left = math.floor(room * length / previous) + 1
    while left > 0 and previous - part_of(previous, length - left, length) > room do left = left - 1 end
    return left
  end

  -- WindowState.RetryAfterMillis, of a sliding one
  local function window_retry(state, maximum, hits, length)
    local ends, room = state.start + length, maximum - hits
    if state.count <= room then return ends - left_for(state.previous, room - state.count, length) - now end
    return ends + length - left_for(state.count, room, length) - now
  end

  return counted, window_retry
end

-- Read and evaluate.
local states, check = {}, {}
local counted, window_retry
local last = #KEYS
local operation, stream, known, known_till = nil, nil, nil, 0
if ARGV[3] == 'o' then operation, last = KEYS[last], last - 1 end
if ARGV[3] == 's' then
  stream, last = KEYS[last], last - 1
  known, known_till = known_at(stream)
end
local index, record_key, listed = KEYS[last], KEYS[last - 1], 0
if token ~= '' then
  -- A release has overtaken this call: whoever asked has given it up.
  if redis.call('EXISTS', record_key) == 1 then return redis.error_reply('WEIR given up') end
  local all, _, found = count(index)
  listed, expired = all - found, found
end
local replay, retell, life = nil, nil, nil -- the token of the lease that the operation holds
if operation then
  local kind, _, holder, body, attempt, told = known_at(operation)
  local mine = tonumber(ARGV[5])
  if kind == HOLDING then
    local record = record_at(string.sub(record_key, 1, -1 - #token) .. holder)
    if record and record[STATE] == HOLDING and record[EXPIRY] > now then
      if body ~= ARGV[4] then return {4} end
      replay, life = holder, record[EXPIRY] - now
      retell = {record[UNTIL], holder, body, max(attempt, mine), told + 1}
    end
  elseif kind == ENDED and mine > 0 and mine <= attempt then
    return {5}
  end
end
local refused, groups, grouped = false, {}, false
for i = 1, checks do
  local a = from + (i - 1) * 7
  local c = {
    kind = ARGV[a], key = KEYS[tonumber(ARGV[a + 1])], hits = tonumber(ARGV[a + 2]), mode = ARGV[a + 3],
    x = tonumber(ARGV[a + 4]), y = tonumber(ARGV[a + 5]), z = ARGV[a + 6],
  }
  local sliding = c.kind == 's'
  if sliding then
    c.kind = 'w'
    if not counted then counted, window_retry = sliding_windows() end
  end
  if c.kind ~= 'c' then
    local z = tonumber(c.z)
    if not z then
      z, c.reserve, c.name = string.match(c.z, '^(%d+) (%d+) (.*)$')
      z = tonumber(z)
    end
    c.z = z
  end
  check[i] = c
  local state = states[c.key]
  if c.kind == 'b' then
    if not state then state = bucket_at(redis.call('GET', c.key), c.x, c.y, c.z) end
    c.passed = c.hits < 0 or c.hits <= c.x and state.level >= c.hits * c.y
  elseif c.kind == 'w' then
    if not state then state = window_at(redis.call('GET', c.key), c.y, sliding) end
    local hits = sliding and counted(state, c.y) or state.count
    c.passed = c.hits < 0 or c.x > 0 and c.hits <= c.x and hits + c.hits <= c.x
  else
    if not state then
      local all, ended, found = count(c.key)
      state = {live = all - ended, kept = all - found}
    end
    c.passed = c.hits < 0 or state.live < c.x
  end
  states[c.key] = state
  if replay then c.passed = true end
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

local gone = known == TOMBSTONE
refused = refused or gone

-- Charge, each state once.
local slots, reserved = {}, {}
for i = 1, replay and 0 or checks do
  local c = check[i]
  local state = states[c.key]
  local over = c.kind == 'w' and c.z == 1 and c.mode ~= 's' and not c.passed and not gone
  if over or c.passed and not refused then
    if c.kind == 'b' then
      if c.hits ~= 0 and not state.charged then
        local full = c.x * c.y
        if c.hits < -floor_div(MAX_EXACT, c.y) then state.level = full -- more than any debt
        else state.level = min(full, state.level - c.hits * c.y) end
        state.write, state.charged = true, true
      end
    elseif c.kind == 'w' then
      if c.hits ~= 0 and not state.charged then
        local count = state.count + c.hits
        state.count = min(MAX_EXACT, max(0, count))
        if count < 0 and state.previous then state.previous = max(0, state.previous + count) end
        state.write, state.charged = true, true
      end
    elseif c.hits >= 0 and not state.charged then
      state.live, state.charged, state.held = state.live + 1, true, true
      life = min(life or c.y, c.y)
      local linger, name = string.match(c.z, '^(%d+) (.*)$')
      local s = #slots
      slots[s + 1], slots[s + 2], slots[s + 3] = c.key, name, tonumber(linger)
    end
    if c.reserve and c.hits >= 0 and not refused and not state.reserved then
      state.reserved = true
      life = min(life or tonumber(c.reserve), tonumber(c.reserve))
      local r = #reserved
      reserved[r + 1], reserved[r + 2], reserved[r + 3], reserved[r + 4] = c.key, c.name, c.hits, 0
      if c.kind == 'b' then reserved[r + 5], reserved[r + 6], reserved[r + 7] = c.x, c.y, c.z
      else reserved[r + 5], reserved[r + 6], reserved[r + 7] = c.y, state.start, state.previous and -1 or 0 end
    end
  end
end
if operation and not refused and not replay then life = life or OPERATION_LIFE end

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
local reply = {replay and 3 or gone and 2 or refused and 0 or 1, expired, life or 0}
for i = 1, checks do
  local c = check[i]
  local state = states[c.key]
  local remaining, retry, reset = 0, 0, 0
  if c.kind == 'b' then
    local ahead, full = state.millis - now, c.x * c.y
    reset = ahead + ceil_div(full - state.level, c.z)
    if state.write then
      redis.call('SET', c.key, cmsgpack.pack(WRITES, state.level, c.x, c.y, c.z, state.millis), 'PX', reset + SLACK)
      state.write = false
    end
    if state.level > 0 then remaining = floor_div(state.level, c.y) end
    if not c.passed and c.hits <= c.x then retry = ahead + ceil_div(max(0, c.hits * c.y - state.level), c.z) end
  elseif c.kind == 'w' then
    local previous = state.previous
    reset = state.start + c.y - now
    if previous and state.count > 0 then reset = reset + c.y end
    if state.write then
      local packed = previous and cmsgpack.pack(WRITES, state.start, state.count, previous) or cmsgpack.pack(WRITES, state.start, state.count)
      redis.call('SET', c.key, packed, 'PX', reset + SLACK)
      state.write = false
    end
    remaining = max(0, c.x - (previous and counted(state, c.y) or state.count))
    if not c.passed and c.x > 0 and c.hits <= c.x then
      retry = previous and window_retry(state, c.x, c.hits, c.y) or reset
    end
  else
    if state.held then
      redis.call('ZADD', c.key, now + life, token)
      keep(c.key, life + SLACK, state.kept)
      state.held = false
    end
    remaining = max(0, c.x - state.live)
  end
  local r = #reply
  reply[r + 1], reply[r + 2], reply[r + 3], reply[r + 4] = c.passed and 1 or 0, remaining, retry, reset
end
if replay then
  know(operation, HOLDING, unpack(retell))
  reply[#reply + 1] = replay
  return reply
end
local remembered = stream and not known
if life then
  local slack = #reserved > 0 and RESERVED_SLACK or RECORD_SLACK
  local record = {WRITES, life, now, now + life, now + life + slack, HOLDING, remembered and stream or '', operation or '', #slots / 3}
  for i = 1, #slots do record[SLOTS + i] = slots[i] end
  local r = #record
  for i = 1, #reserved do record[r + i] = reserved[i] end
  write_record(record_key, record)
  if #slots + #reserved > 0 then
    redis.call('ZADD', index, now + life, token)
    keep(index, life + INDEX_SLACK, listed)
  end
  if operation then know(operation, HOLDING, record[UNTIL], token, ARGV[4], tonumber(ARGV[5]), 0) end
  if remembered then know(stream, HOLDING, record[UNTIL], token) end
  known_till = max(known_till, record[UNTIL])
end
if gone then
  redis.call('DEL', stream)
elseif known then -- it has asked before: from now on the stream alone finds nothing
  know(stream, AMBIGUOUS, known_till, '')
end
return reply
