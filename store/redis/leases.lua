#!lua flags=no-writes
-- leases.lua lists live leases of a domain, those that expire first first, and by their
-- tokens, byte by byte, those that expire together. It writes nothing.
--
-- The call is as each in common.lua says, and of a page
-- keys  1  the domain's index of leases
--       The records of the leases are named by the index, and the sets of slots by the
--       records: they are in the same slot.
-- args  2  how many leases are told, at most: 1 to 1000
--       3  what the names of the domain's records begin with
--       4  the expiry (ms) of the lease behind which the page begins; 0 for the first page
--       5  the token of that lease
--
-- A page reads at most args[2] records, and ends with the record that brings the slots and
-- reservations read to PARTS; a record has at most 1024 and 128 of them. To find
-- where the page begins takes some 20 reads of one member of the index each.
--
-- The reply is {now (ms), 1 if there are more, else 0, how many leases follow, and of each: token, expiry
-- (ms), when it was granted (ms; -1: its record is lost, and what follows is empty), 1 if it lingers, else
-- 0, the keys of its stream and its operation ("" for none), {key and name of the limit of each
-- slot that it holds}, {key, name of the limit, hits, and 1 if it is settled, else 0, of each
-- reservation}}.

-- include common.lua
-- include record.lua

local PARTS = 1000

-- Whether a comes before b. Lua's own < goes by the server's locale.
local function before(a, b)
  for i = 1, min(#a, #b) do
    local x, y = string.byte(a, i), string.byte(b, i)
    if x ~= y then return x < y end
  end
  return #a < #b
end

-- The rank in the index of the first live lease behind the cursor, which may not be there
-- any more.
local function first_behind(index, expiry, token)
  if expiry <= now then return call('ZCOUNT', index, '-inf', now) end
  local from = call('ZCOUNT', index, '-inf', string.format('(%.0f', expiry))
  local till = from + call('ZCOUNT', index, expiry, expiry)
  while from < till do
    local middle = floor_div(from + till, 2)
    if before(token, call('ZRANGE', index, middle, middle)[1]) then till = middle else from = middle + 1 end
  end
  return from
end

local function page(at, ...)
  local args = list(...)
  local index, most = KEYS[at + 1], args[2]
  local from = first_behind(index, args[4], args[5])
  local found = call('ZRANGE', index, from, from + most, 'WITHSCORES')
  local reply, parts, more = {now, 0, 0}, 0, 0
  for m = 1, #found, 2 do
    if m > 2 * most or parts >= PARTS then
      more = 1
      break
    end
    local record, first, last = record_at(args[3] .. found[m])
    local slots, reserved = {}, {}
    local granted, lingers, stream, operation = -1, 0, '', ''
    if record then
      granted, stream, operation = record[GRANTED], record[STREAM], record[OPERATION]
      if record[STATE] == LINGERING then lingers = 1 end
      for i = SLOTS + 1, first - 1, 3 do
        if tonumber(call('ZSCORE', record[i], found[m]) or 0) > now then
          local s = #slots
          slots[s + 1], slots[s + 2] = record[i], record[i + 1]
        end
      end
      for i = first, last, 7 do
        local r = #reserved
        reserved[r + 1], reserved[r + 2], reserved[r + 3], reserved[r + 4] = record[i], record[i + 1], record[i + 2], record[i + 3]
      end
      parts = parts + record[SLOTS] + #reserved / 4
    end
    local r = #reply
    reply[r + 1], reply[r + 2], reply[r + 3], reply[r + 4] = found[m], tonumber(found[m + 1]), granted, lingers
    reply[r + 5], reply[r + 6], reply[r + 7], reply[r + 8] = stream, operation, slots, reserved
  end
  reply[2], reply[3] = more, (#reply - 3) / 8
  return reply
end

return each(page)
