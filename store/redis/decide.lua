#!lua
-- decide.lua decides all checks of a request at one instant: all that passed are charged,
-- or none is; and one request of the call after the other. The arithmetic is limit/state.go
-- and window.go, line for line; all numbers are whole and below 2^53, so doubles hold them
-- exactly.
--
-- The call is as each in common.lua says, and of a request
-- keys  1..n       the states of the checks, each once
--       n+1, n+2   the lease's record and the domain's index of leases; only
--                  with a lease
--       n+3        what is known of the stream or the operation; only with one
--       The record of the lease that an operation holds is in the same slot.
-- args  2          the lease's token; "" without a lease
--       3          "s" with a stream, "o" with an operation, else ""
--       then, with an operation, what it asks, and the number of the attempt (0: none)
--       then 9 a check:
--         kind     b (token bucket), w (window), s (sliding window) or c (concurrency)
--         key      index into keys
--         hits     -2^53 < hits < 2^53; negative refunds
--         mode     "" enforced, "s" shadow, else a quota group
--         b:       capacity (tokens), scale (units a token), refill (units a ms)
--         w, s:    max (hits), length (ms), 1 to charge it when over, else 0
--         c:       max (slots), life of a lease (ms), linger (ms)
--         reserve  how long what a bucket or a window is charged is reserved (ms); 0: not
--         name     of the limit, if it is concurrency or reserves; else ""
--
-- The reply is {admitted (1; 0; 2: refused, since its stream had ended; 3: told again what
-- the operation holds), leases found expired, life of the lease (ms; 0: no lease), then 4 a
-- check: passed (1, 0), remaining, retry after (ms), reset after (ms)}; and if it was told
-- again the token of the lease. {4} if the operation asked for something else, {5} if
-- the attempt is late.
--
-- Everything of a request is read and evaluated before its first write, and every write is
-- one that cannot fail, since an error does not roll back.

local REAP = 64 -- expired members removed a request, at most

local OPERATION_LIFE = 60000

local FIELDS = 9 -- of a check

-- Counts the members of a set: all, the expired, and how many of these are to be removed
-- later, at most budget.
local function count(key, budget)
  local all = call('ZCARD', key)
  if all == 0 then return 0, 0, 0 end
  local ended = call('ZCOUNT', key, '-inf', now)
  return all, ended, min(ended, budget)
end

-- A set has had an expiry since its first member.
local function keep(key, ms, members)
  if members == 0 then
    call('PEXPIRE', key, ms)
  else
    call('PEXPIRE', key, ms, 'GT')
  end
end

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

-- WindowState.Counted
local function counted(state, length)
  if not state.previous then return state.count end
  local passed = part_of(state.previous, max(0, now - state.start), length)
  return min(MAX_EXACT, state.count + (state.previous - passed))
end

-- leftFor: the quotient is below 2^35, so a double is off by 1 at most, which part_of tells.
local function left_for(previous, room, length)
  local left = math.floor(room * length / previous) + 1
  while left > 0 and previous - part_of(previous, length - left, length) > room do left = left - 1 end
  return left
end

-- WindowState.RetryAfterMillis
local function window_retry(state, maximum, hits, length)
  local ends, room = state.start + length, maximum - hits
  if not state.previous then return ends - now end
  if state.count <= room then return ends - left_for(state.previous, room - state.count, length) - now end
  return ends + length - left_for(state.count, room, length) - now
end

local function decide(keys, args)
  local token, with = args[2], args[3]
  local from = with == 'o' and 6 or 4
  local upto = #args

  -- Read and evaluate.
  local expired, budget = 0, REAP
  local reaped = nil -- key: how many of its expired members are removed
  local last = #keys
  local operation, stream, known, known_till = nil, nil, nil, 0
  if with == 'o' then operation, last = keys[last], last - 1 end
  if with == 's' then
    stream, last = keys[last], last - 1
    known, known_till = known_at(stream)
  end
  local index, record_key, listed = keys[last], keys[last - 1], 0
  if token ~= '' then
    -- A release has overtaken this call: whoever asked has given it up.
    if call('EXISTS', record_key) == 1 then return 'WEIR given up' end
    local all, _, found = count(index, budget)
    listed, expired, budget = all - found, found, budget - found
    if found > 0 then reaped = {[index] = found} end
  end
  local replay, retell, life = nil, nil, nil -- the token of the lease that the operation holds
  if operation then
    local kind, _, holder, body, attempt, told = known_at(operation)
    local mine = args[5]
    if kind == HOLDING then
      local record = record_at(string.sub(record_key, 1, -1 - #token) .. holder)
      if record and record[STATE] == HOLDING and record[EXPIRY] > now then
        if body ~= args[4] then return {4} end
        replay, life = holder, record[EXPIRY] - now
        retell = {record[UNTIL], holder, body, max(attempt, mine), told + 1}
      end
    elseif kind == ENDED and mine > 0 and mine <= attempt then
      return {5}
    end
  end
  local states, passed = {}, {}       -- by the index of the key; by that of the check's first field
  local refused, groups = false, nil  -- groups: whether one of the quota group is over
  for a = from, upto, FIELDS do
    local kind, k, hits, mode, x, y = args[a], args[a + 1], args[a + 2], args[a + 3], args[a + 4], args[a + 5]
    local state, pass = states[k], nil
    if kind == 'b' then
      if not state then state = bucket_at(call('GET', keys[k]), x, y, args[a + 6]) end
      pass = hits < 0 or hits <= x and state.level >= hits * y
    elseif kind == 'c' then
      if not state then
        local all, ended, found = count(keys[k], budget)
        budget = budget - found
        if found > 0 then
          reaped = reaped or {}
          reaped[keys[k]] = found
        end
        state = {live = all - ended, kept = all - found}
      end
      pass = hits < 0 or state.live < x
    else
      if not state then state = window_at(call('GET', keys[k]), y, kind == 's') end
      pass = hits < 0 or x > 0 and hits <= x and counted(state, y) + hits <= x
    end
    states[k] = state
    pass = pass or replay ~= nil
    passed[a] = pass
    if mode == '' then
      refused = refused or not pass
    elseif mode ~= 's' then
      groups = groups or {}
      groups[mode] = groups[mode] or not pass
    end
  end
  if groups and not refused then
    refused = true
    for _, over in pairs(groups) do refused = refused and over end
  end

  local gone = known == TOMBSTONE
  refused = refused or gone

  -- Charge, each state once.
  local slots, reserved, ahead = nil, nil, nil
  for a = from, replay and 0 or upto, FIELDS do
    local kind, hits, x, y, z = args[a], args[a + 2], args[a + 4], args[a + 5], args[a + 6]
    local pass, k = passed[a], args[a + 1]
    local window = kind == 'w' or kind == 's'
    local over = window and z == 1 and args[a + 3] ~= 's' and not pass and not gone
    if over or pass and not refused then
      local state = states[k]
      if kind == 'b' then
        if hits ~= 0 and not state.charged then
          local full = x * y
          if hits < -floor_div(MAX_EXACT, y) then state.level = full -- more than any debt
          else state.level = min(full, state.level - hits * y) end
          state.write, state.charged = true, true
        end
      elseif window then
        if hits ~= 0 and not state.charged then
          local count = state.count + hits
          state.count = min(MAX_EXACT, max(0, count))
          if count < 0 and state.previous then state.previous = max(0, state.previous + count) end
          state.write, state.charged = true, true
          if state.start > now then
            ahead = ahead or {}
            ahead[keys[k]] = state.start
          end
        end
      elseif hits >= 0 and not state.charged then
        state.live, state.charged, state.held = state.live + 1, true, true
        life = min(life or y, y)
        slots = slots or {}
        local s = #slots
        slots[s + 1], slots[s + 2], slots[s + 3] = keys[k], args[a + 8], z
      end
      local reserve = args[a + 7]
      if reserve > 0 and hits >= 0 and not refused and not state.reserved then
        state.reserved = true
        life = min(life or reserve, reserve)
        reserved = reserved or {}
        local r = #reserved
        reserved[r + 1], reserved[r + 2], reserved[r + 3], reserved[r + 4] = keys[k], args[a + 8], hits, 0
        if kind == 'b' then reserved[r + 5], reserved[r + 6], reserved[r + 7] = x, y, z
        else reserved[r + 5], reserved[r + 6], reserved[r + 7] = y, state.start, state.previous and -1 or 0 end
      end
    end
  end
  if operation and not refused and not replay then life = life or OPERATION_LIFE end

  -- Write.
  if reaped then
    for key, n in pairs(reaped) do call('ZREMRANGEBYRANK', key, 0, n - 1) end
  end
  local reply = {replay and 3 or gone and 2 or refused and 0 or 1, expired, life or 0}
  local r = 3
  for a = from, upto, FIELDS do
    local kind, k, hits, x, y = args[a], args[a + 1], args[a + 2], args[a + 4], args[a + 5]
    local state, pass = states[k], passed[a]
    local remaining, retry, reset = 0, 0, 0
    if kind == 'b' then
      local z = args[a + 6]
      local ahead, level = state.millis - now, state.level
      reset = ahead + ceil_div(x * y - level, z)
      if state.write then
        call('SET', keys[k], pack(WRITES, level, x, y, z, state.millis), 'PX', reset + SLACK)
        state.write = false
      end
      if level > 0 then remaining = floor_div(level, y) end
      if not pass and hits <= x then retry = ahead + ceil_div(max(0, hits * y - level), z) end
    elseif kind == 'c' then
      if state.held then
        call('ZADD', keys[k], now + life, token)
        keep(keys[k], life + SLACK, state.kept)
        state.held = false
      end
      remaining = max(0, x - state.live)
    else
      local previous = state.previous
      reset = state.start + y - now
      if previous and state.count > 0 then reset = reset + y end
      if state.write then
        local packed = previous and pack(WRITES, state.start, state.count, previous) or pack(WRITES, state.start, state.count)
        call('SET', keys[k], packed, 'PX', reset + SLACK)
        state.write = false
      end
      remaining = max(0, x - counted(state, y))
      if not pass and x > 0 and hits <= x then retry = window_retry(state, x, hits, y) end
    end
    reply[r + 1], reply[r + 2], reply[r + 3], reply[r + 4] = pass and 1 or 0, remaining, retry, reset
    r = r + 4
  end
  if replay then
    know(operation, HOLDING, unpack(retell))
    reply[r + 1] = replay
    return reply
  end
  local remembered = stream and not known
  if life then
    local record = {WRITES, life, now, now + life, now + life + (reserved and RESERVED_SLACK or RECORD_SLACK), HOLDING,
      remembered and stream or '', operation or '', slots and #slots / 3 or 0}
    if slots then
      for i = 1, #slots do record[SLOTS + i] = slots[i] end
    end
    if reserved then
      local n = #record
      for i = 1, #reserved do record[n + i] = reserved[i] end
    end
    record[#record + 1] = ahead
    write_record(record_key, record)
    if slots or reserved then
      call('ZADD', index, now + life, token)
      keep(index, life + INDEX_SLACK, listed)
    end
    if operation then know(operation, HOLDING, record[UNTIL], token, args[4], args[5], 0) end
    local till = reserved and record[EXPIRY] + STREAM_SLACK or record[UNTIL]
    if remembered then know(stream, HOLDING, till, token) end
    known_till = max(known_till, till)
  end
  if gone then
    call('DEL', stream)
  elseif known then -- it has asked before: from now on the stream alone finds nothing
    know(stream, AMBIGUOUS, known_till, '')
  end
  return reply
end

return each(decide)
