#!lua flags=allow-oom
-- renew.lua extends a live lease by its whole life from now on. It never revives
-- one that ended, expired or was lost.
--
-- The call is as each in common.lua says, and of a renewal
-- keys  1  the lease's record
--       2  the domain's index of leases
--       The sets of slots are taken from the record: they are in the same slot.
-- args  2  the lease's token
--       3  "1" for a stream's sign of life: it extends no lease that lingers
--
-- The reply is {the life of the lease from now on (ms), or 0: lost}.

-- include common.lua
-- include record.lua
-- include lease.lua

local function renew(at, ...)
  local args = list(...)
  local token = args[2]
  local record, first, last = record_at(KEYS[at + 1])
  if not record then return {0} end
  local life, expiry, state = record[2], record[EXPIRY], record[STATE]
  if expiry <= now or state == ENDED or state == LINGERING and args[3] == '1' then return {0} end

  -- Somebody else may have got a slot that is not there any more, or has expired: one
  -- that lingers may do so before the lease.
  for i = SLOTS + 1, first - 1, 3 do
    if tonumber(call('ZSCORE', record[i], token) or 0) <= now then return {0} end
  end
  local known = {} -- by what the lease is known, and what else that says
  for i = STREAM, OPERATION do
    if record[i] ~= '' then
      local kind, _, holder, body, attempt, told = known_at(record[i])
      if kind == HOLDING and holder == token then known[record[i]] = {token, body, attempt, told} end
    end
  end

  -- Never shorter: time may have been set back since.
  record[EXPIRY] = max(expiry, now + life)
  record[UNTIL] = record[EXPIRY] + outlives(record, first, last)
  life = record[EXPIRY] - now
  for i = SLOTS + 1, first - 1, 3 do
    call('ZADD', record[i], record[EXPIRY], token)
    extend(record[i], life + SLACK)
  end
  if record[SLOTS] > 0 or first <= last then
    call('ZADD', KEYS[at + 2], record[EXPIRY], token)
    extend(KEYS[at + 2], life + INDEX_SLACK)
  end
  for key, rest in pairs(known) do
    local till = record[UNTIL]
    if key == record[STREAM] and outlives(record, first, last) == RESERVED_SLACK then till = record[EXPIRY] + STREAM_SLACK end
    know(key, HOLDING, till, unpack(rest))
  end
  write_record(KEYS[at + 1], record)
  return {life}
end

return each(renew)
