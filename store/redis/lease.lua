-- lease.lua stands in the scripts that change a lease, behind common.lua.

-- How long a record with such reservations outlives its lease.
local function outlives(record, first, last)
  for i = first, last, 7 do
    if record[i + 3] == 0 then return RESERVED_SLACK end
  end
  return RECORD_SLACK
end

-- Has a set live for so many ms at least. To GT a set without an expiry lives for ever.
local function extend(key, ms)
  if call('PEXPIRE', key, ms, 'GT') == 0 then call('PEXPIRE', key, ms, 'NX') end
end
