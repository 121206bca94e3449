-- decide_any.lua decides any request, in decide.lua.

-- include window.lua
-- include record.lua

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
  if not state[PREVIOUS] then return state[COUNT] end
  local passed = part_of(state[PREVIOUS], max(0, now - state[START]), length)
  return min(MAX_EXACT, state[COUNT] + (state[PREVIOUS] - passed))
end

-- leftFor: the quotient is below 2^35, so a double is off by 1 at most, which part_of tells.
local function left_for(previous, room, length)
  local left = math.floor(room * length / previous) + 1
  while left > 0 and previous - part_of(previous, length - left, length) > room do left = left - 1 end
  return left
end

-- WindowState.RetryAfterMillis
local function window_retry(state, maximum, hits, length)
  local ends, room = state[START] + length, maximum - hits
  if not state[PREVIOUS] then return ends - now end
  if state[COUNT] <= room then return ends - left_for(state[PREVIOUS], room - state[COUNT], length) - now end
  return ends + length - left_for(state[COUNT], room, length) - now
end

-- A set, and how many of its expired members are to be removed by this request, at most budget.
local function count(key, budget)
  local set = sets[key]
  if not set then
    local all = call('ZCARD', key)
    set = {all = all, before = all, ended = 0, reap = 0, new = nil, life = 0}
    if all > 0 then set.ended = call('ZCOUNT', key, '-inf', now) end
    sets[key] = set
  end
  return set, min(set.ended, budget)
end

local function reap(set, n) set.all, set.ended, set.reap = set.all - n, set.ended - n, set.reap + n end

local function add(set, score, member, life)
  set.new = set.new or {}
  local n = #set.new
  set.new[n + 1], set.new[n + 2] = score, member
  set.all, set.life = set.all + 1, max(set.life, life)
end

local REAP = 64 -- expired members removed a request, at most

local OPERATION_LIFE = 60000

local FIELDS = 10 -- of a check

-- The fields of a bucket and of slots, behind the first three of window.lua.
local LEVEL, MILLIS = 4, 5
local SET_OF, LIVE = 4, 5

local function decide(at, args)
  local n, token, with = args[1], args[2], args[3]
  local from = with == 'o' and 6 or 4
  local upto = #args

  -- Read and evaluate.
  local expired, budget = 0, REAP
  local reaped = nil -- set: how many of its expired members are removed
  local last = at + n
  local operation, stream, known, known_till = nil, nil, nil, 0
  if with == 'o' then operation, last = KEYS[last], last - 1 end
  if with == 's' then
    stream, last = KEYS[last], last - 1
    known, known_till = known_at(stream)
  end
  local index, record_key = nil, KEYS[last - 1]
  if token ~= '' then
    -- A release has overtaken this call: whoever asked has given it up.
    if strings[record_key] then return pack('WEIR given up') end
    index, expired = count(KEYS[last], budget)
    budget = budget - expired
    if expired > 0 then reaped = {[index] = expired} end
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
  -- States by the index of the key, and which checks passed; with room, since to grow takes time.
  local states, passed = {false, false, false, false}, {false, false, false, false}
  local refused, groups = false, nil -- groups: whether one of the quota group is over
  local c = 0
  for a = from, upto, FIELDS do
    local kind, k, hits, mode, x, y = args[a], args[a + 1], args[a + 2], args[a + 3], args[a + 4], args[a + 5]
    local state, pass = states[k], nil
    if kind == 'b' then
      if not state then
        local level, millis, write = bucket_at(get(KEYS[at + k]), x, y, args[a + 6])
        state = {write, false, false, level, millis}
      end
      pass = bucket_passes(state[LEVEL], x, y, hits)
    elseif kind == 'c' then
      if not state then
        local set, found = count(KEYS[at + k], budget)
        budget = budget - found
        if found > 0 then
          reaped = reaped or {}
          reaped[set] = found
        end
        state = {false, false, false, set, set.all - set.ended}
      end
      pass = hits < 0 or state[LIVE] < x
    else
      if not state then state = window_at(get(KEYS[at + k]), y, kind == 's') end
      pass = hits < 0 or x > 0 and hits <= x and counted(state, y) + hits <= x
    end
    states[k] = state
    pass = pass or replay ~= nil
    c = c + 1
    passed[c] = pass
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
  c = 0
  for a = from, replay and 0 or upto, FIELDS do
    c = c + 1
    local kind, hits, x, y, z = args[a], args[a + 2], args[a + 4], args[a + 5], args[a + 6]
    local pass, k = passed[c], args[a + 1]
    local window = kind == 'w' or kind == 's'
    local over = window and z == 1 and args[a + 3] ~= 's' and not pass and not gone
    if over or pass and not refused then
      local state = states[k]
      if kind == 'b' then
        if hits ~= 0 and not state[CHARGED] then
          state[LEVEL], state[WRITE], state[CHARGED] = charged(state[LEVEL], x, y, hits), true, true
        end
      elseif window then
        if hits ~= 0 and not state[CHARGED] then
          local count = state[COUNT] + hits
          state[COUNT] = min(MAX_EXACT, max(0, count))
          if count < 0 and state[PREVIOUS] then state[PREVIOUS] = max(0, state[PREVIOUS] + count) end
          state[WRITE], state[CHARGED] = true, true
          if state[START] > now then
            ahead = ahead or {}
            ahead[KEYS[at + k]] = state[START]
          end
        end
      elseif hits >= 0 and not state[CHARGED] then
        state[LIVE], state[CHARGED], state[WRITE] = state[LIVE] + 1, true, true
        life = min(life or y, y)
        slots = slots or {}
        local s = #slots
        slots[s + 1], slots[s + 2], slots[s + 3] = KEYS[at + k], args[a + 8], z
      end
      local reserve = args[a + 7]
      if reserve > 0 and hits >= 0 and not refused and not state[RESERVED] then
        state[RESERVED] = true
        life = min(life or reserve, reserve)
        reserved = reserved or {}
        local r = #reserved
        reserved[r + 1], reserved[r + 2], reserved[r + 3], reserved[r + 4] = KEYS[at + k], args[a + 8], hits, 0
        if kind == 'b' then reserved[r + 5], reserved[r + 6], reserved[r + 7] = x, y, z
        else reserved[r + 5], reserved[r + 6], reserved[r + 7] = y, state[START], state[PREVIOUS] and -1 or 0 end
      end
    end
  end
  if operation and not refused and not replay then life = life or OPERATION_LIFE end

  -- Write.
  if reaped then
    for s, found in pairs(reaped) do reap(s, found) end
  end
  local reply = {replay and 3 or gone and 2 or refused and 0 or 1, expired, life or 0}
  local r = 3
  c = 0
  for a = from, upto, FIELDS do
    c = c + 1
    local kind, k, hits, x, y = args[a], args[a + 1], args[a + 2], args[a + 4], args[a + 5]
    local state, pass = states[k], passed[c]
    local remaining, retry, reset = 0, 0, 0
    if kind == 'b' then
      remaining, retry, reset = told_of_bucket(state[LEVEL], state[MILLIS], x, y, args[a + 6], hits, pass)
      if state[WRITE] then
        put(KEYS[at + k], pack_bucket(state[LEVEL], args[a + 9], state[MILLIS]), reset + SLACK)
        state[WRITE] = false
      end
    elseif kind == 'c' then
      if state[WRITE] then
        add(state[SET_OF], now + life, token, life + SLACK)
        state[WRITE] = false
      end
      remaining = max(0, x - state[LIVE])
    else
      local previous = state[PREVIOUS]
      reset = state[START] + y - now
      if previous and state[COUNT] > 0 then reset = reset + y end
      if state[WRITE] then
        put(KEYS[at + k], pack_window(state[START], state[COUNT], previous), reset + SLACK)
        state[WRITE] = false
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
    strings[record_key] = true
    if slots or reserved then
      add(index, now + life, token, life + INDEX_SLACK)
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
