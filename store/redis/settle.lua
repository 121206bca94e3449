#!lua
-- settle.lua settles what a lease has reserved by what was used in truth, once each, and
-- charges the rest, once for each of a stream's limits, whether or not that much is left.
-- The arithmetic is limit/state.go and window.go, line for line.
--
-- The call is as each in common.lua says, and of a usage
-- keys  1..n  the states of the checks, each once
--       then  the lease's record; only with its token
--       then  what is known of the stream, and those that its usage was charged to, or settled
--             of, and how long (ms) that is remembered; only with a stream
--       The states of what is settled are taken from the record, and the second of the two of
--       the stream that the lease is of: they are in the same slot.
-- args  2     the lease's token; "" to find it by its stream
--       3     "1" with a stream, else ""
--       4     "1" to charge nothing that was not reserved
--       5     what the names of the domain's records begin with
--       then 7 a limit:
--         kind  b (token bucket), w (window), s (sliding window), or n (by the limit's name)
--         key   index into keys; or the name, "" for all
--         hits  -2^53 < hits < 2^53; negative refunds
--         b:    capacity (tokens), scale (units a token), refill (units a ms)
--         w, s: length (ms), 0, 0
--         then  "1" if the limit reserves, else ""
--
-- The reply is for each limit: 1 settled, 2 charged, 3 settled or charged before, 4 late or 5
-- not reserved; and the hits that were charged now.

-- include common.lua
-- include bucket.lua
-- include window.lua
-- include record.lua
-- include lease.lua
-- include debit.lua

-- What became of the usage of a limit.
local IS_SETTLED, IS_CHARGED, BEFORE, LATE, NOT_RESERVED = 1, 2, 3, 4, 5
local USAGE_LIFE = 600000

local function settle(at, ...)
  local args = list(...)
  -- Read and evaluate.
  local token, streamed = args[2], args[3] == '1'
  local mark = nil
  local record, first, last, record_key = nil, 0, -1, nil
  local known = token ~= '' and ENDED -- what is known of the stream: there was a lease
  if streamed then mark = KEYS[at + args[1]] end
  if token == '' and streamed then
    local _
    known, _, token = known_at(KEYS[at + args[1] - 1])
  end
  if token ~= '' then
    record_key = args[5] .. token
    record, first, last = record_at(record_key)
  end

  -- Where it is noted what was told of the stream's usage, and what is to be noted there.
  local told, notes = mark, {}
  if record and record[STREAM] ~= '' then told = string.gsub(record[STREAM], '}:stream:', '}:usage:', 1) end
  local function was_told(set, key)
    return notes[set] and notes[set][key] or tonumber(call('ZSCORE', set, key) or 0) > now
  end
  local function note(set, key)
    if was_told(set, key) then return end
    notes[set] = notes[set] or {}
    notes[set][key] = true
  end

  local debits, settled = {}, false

  -- Settles one reservation, and says how.
  local function settle(i, hits)
    if record[i + 3] == 1 then return BEFORE, 0 end
    if record[STATE] == HOLDING and record[EXPIRY] <= now then return LATE, 0 end
    local key, x, y, z = record[i], record[i + 4], record[i + 5], record[i + 6]
    local more = hits - record[i + 2]
    local packed = call('GET', key)
    if z > 0 then
      debits[#debits + 1] = debit_own_bucket(key, packed, x, y, z, more)
    else
      -- Redis has lost the count, or its slot is moving: there is nothing to give back from.
      if not packed and record[i + 2] > 0 then return LATE, 0 end
      local debit = settle_window(key, window_at(packed, x, z < 0), x, y, more)
      if not debit then return LATE, 0 end
      if more ~= 0 then debits[#debits + 1] = debit end
    end
    record[i + 3], settled = 1, true
    return IS_SETTLED, more
  end

  local reply = {}
  for a = 6, #args, 7 do
    local name, hits = args[a + 1], args[a + 2]
    local key = args[a] ~= 'n' and KEYS[at + name]
    local result, more = NOT_RESERVED, 0
    for i = first, last, 7 do
      if key and record[i] == key or not key and (name == '' or record[i + 1] == name) then
        local one, extra = settle(i, hits)
        if told and one ~= BEFORE then note(told, record[i]) end
        result, more = min(result, one), more + extra
      end
    end
    if result == NOT_RESERVED and key and streamed then
      -- What was reserved stands when the record is gone: of a lease that expired, or ended.
      local lost = args[a + 6] == '1' and not record and known and known ~= TOMBSTONE
      if was_told(mark, key) then
        result = BEFORE
      elseif lost then
        if known == HOLDING then result = LATE end
      elseif args[4] ~= '1' then
        note(mark, key)
        result, more = IS_CHARGED, hits
        local packed = call('GET', key)
        local x, y, z = args[a + 3], args[a + 4], args[a + 5]
        if args[a] == 'b' then
          debits[#debits + 1] = debit_own_bucket(key, packed, x, y, z, hits)
        else
          debits[#debits + 1] = debit_window(key, window_at(packed, x, args[a] == 's'), x, hits)
        end
      end
    end
    local r = #reply
    reply[r + 1], reply[r + 2] = result, max(-MAX_EXACT, min(MAX_EXACT, more))
  end

  -- Write.
  debited(debits)
  for set, limits in pairs(notes) do
    for key in pairs(limits) do call('ZADD', set, now + USAGE_LIFE, key) end
    call('PEXPIRE', set, USAGE_LIFE)
  end
  if settled then
    if outlives(record, first, last) == RECORD_SLACK then record[UNTIL] = max(now, record[EXPIRY]) + RECORD_SLACK end
    write_record(record_key, record)
  end
  return reply
end

return each(settle)
