-- record.lua stands in the scripts that read leases.

local RECORD_SLACK = 60000         -- ms that a lease's record outlives the lease
local RESERVED_SLACK = 3600000     -- the same while something that it reserved is not settled
local STREAM_SLACK = 86400000      -- ms that a stream is known after its lease, while the same
local INDEX_SLACK = 3600000        -- ms that the index waits to be cleaned

-- What is known of a stream: {format, kind, until (ms), token of its lease}. From
-- then on nothing is known. Of an operation also: what was asked, the latest attempt, and
-- how often it was told of its lease again.
local HOLDING, ENDED, AMBIGUOUS, TOMBSTONE, LINGERING = 1, 2, 3, 4, 5

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
  write(key, pack_state(kind, till, ...), till - now)
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
  write(key, pack_state(unpack(record, 2)), record[UNTIL] - now)
end
