#!lua flags=allow-oom
-- release.lua ends a lease: the first release of a live lease frees the slots
-- that its record names, and no others. Or it undoes a decision that nobody was told.
--
-- The call is as each in common.lua says, and of a release
-- keys  1     the lease's record; or what is known of the stream that holds it
--       2     the domain's index of leases
--       3..n  to undo: the states of the checks
--       The sets of slots are taken from the record, and of a stream the record from
--       what is known of it: they are in the same slot.
-- args  2  the lease's token; "" to find it by its stream
--       3  "1" if the decision that would grant the lease may still be under way:
--          a lease that is not there is then marked, so that it never will be, and a
--          stream of which nothing is known gets a tombstone
--       4  "e" if the work ended before its upstream answered: slots may linger; "u" to
--          undo: hits are given back too, and a lease that its operation was told of
--          again is kept
--       5  by stream: what the names of the domain's records begin with
--       then, to undo, 5 for each state:
--         kind  b (token bucket), w (window) or s (sliding window)
--         hits  0 < hits < 2^53
--         b:    capacity (tokens), scale (units a token), refill (units a ms)
--         w, s: length (ms), 0, 0
--
-- The reply is {1 released, 2 not held, 3 expired or 4 lingering; of a lease that was held
-- also the ms that it was, and for each slot that is free now its key and the name of
-- its limit}.

-- include common.lua
-- include bucket.lua
-- include window.lua
-- include record.lua
-- include lease.lua
-- include debit.lua

local TOMBSTONE_LIFE = 30000

local function release(at, ...)
  local args = list(...)
  local record_key, token, early, undo = KEYS[at + 1], args[2], args[4] == 'e', args[4] == 'u'
  if token == '' then
    local kind, _, holder = known_at(KEYS[at + 1])
    if not kind and args[3] == '1' then know(KEYS[at + 1], TOMBSTONE, now + TOMBSTONE_LIFE, '') end
    if kind ~= HOLDING then return {2} end
    record_key, token = args[5] .. holder, holder
  end

  local record, first, last = record_at(record_key)
  if not record then
    if args[3] == '1' and args[2] ~= '' then
      -- A record that means nothing: nothing finds it held.
      write(record_key, pack_state(0, 0, 0, 0), RECORD_SLACK)
    end
    return {2}
  end
  local granted, expiry, stream, operation = record[GRANTED], record[EXPIRY], record[STREAM], record[OPERATION]
  if record[STATE] == ENDED then return {2} end
  if early and record[STATE] == LINGERING and expiry > now then return {2} end -- told again

  -- Read all that may be of a format that is not known before anything is written.
  local of_stream, of_operation, attempt = false, false, 0
  local stream_till = now + outlives(record, first, last)
  if stream ~= '' then
    local kind, till, holder = known_at(stream)
    of_stream = kind == HOLDING and holder == token
    if expiry <= now then stream_till = max(stream_till, till) end -- its estimates stand
  end
  if operation ~= '' then
    local kind, _, holder, _, latest, told = known_at(operation)
    of_operation, attempt = kind == HOLDING and holder == token, latest
    if of_operation and undo and told > 0 then return {2} end
  end
  local debits, settled = {}, {}
  if undo and expiry > now then
    -- Somebody has told what was used: that is what stays charged.
    for i = first, last, 7 do settled[record[i]] = record[i + 3] == 1 end
    local ahead = record[last + 1]
    if type(ahead) ~= 'table' then ahead = {} end
    for i = 3, args[1] do
      local a = 6 + (i - 3) * 5
      local hits, x, y, z = args[a + 1], args[a + 2], args[a + 3], args[a + 4]
      local packed = call('GET', KEYS[at + i])
      if settled[KEYS[at + i]] then
        -- as it is
      elseif args[a] == 'b' then
        debits[#debits + 1] = debit_own_bucket(KEYS[at + i], packed, x, y, z, -hits)
      else
        local start = ahead[KEYS[at + i]] or granted - fmod(granted, x)
        debits[#debits + 1] = settle_window(KEYS[at + i], window_at(packed, x, args[a] == 's'), x, start, -hits)
      end
    end
  end

  if of_stream then know(stream, ENDED, stream_till, token) end
  if of_operation then
    if undo or attempt == 0 then call('DEL', operation)
    else know(operation, ENDED, now + RECORD_SLACK, '', '', attempt, 0) end
  end
  if expiry <= now then return {3} end
  debited(debits)

  local reply = {1, max(0, now - granted)}
  local rest, till = {WRITES, record[2], granted, now, 0, ENDED, stream, '', 0}, 0
  for i = SLOTS + 1, first - 1, 3 do
    local linger = early and record[i + 2] or 0
    -- A slot that was reset stays free.
    if linger > 0 and call('ZSCORE', record[i], token) then
      call('ZADD', record[i], now + linger, token)
      extend(record[i], linger + SLACK)
      local r = #rest
      rest[r + 1], rest[r + 2], rest[r + 3] = record[i], record[i + 1], linger
      rest[SLOTS] = rest[SLOTS] + 1
      till = max(till, now + linger)
    else
      call('ZREM', record[i], token)
      reply[#reply + 1], reply[#reply + 2] = record[i], record[i + 1]
    end
  end
  if till > 0 then
    reply[1], rest[EXPIRY], rest[STATE] = 4, till, LINGERING
    call('ZADD', KEYS[at + 2], till, token)
    extend(KEYS[at + 2], till - now + INDEX_SLACK)
  else
    call('ZREM', KEYS[at + 2], token)
  end
  if undo or till == 0 and first > last then
    call('DEL', record_key)
  else
    for i = first, last do rest[#rest + 1] = record[i] end
    rest[UNTIL] = rest[EXPIRY] + outlives(record, first, last)
    write_record(record_key, rest)
  end
  return reply
end

return each(release)
