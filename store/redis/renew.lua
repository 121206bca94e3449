#!lua flags=allow-oom
-- renew.lua extends a live lease by its whole life from now on. It never revives
-- one that ended, expired or was lost.
--
-- KEYS  1  the lease's record
--       2  the domain's index of leases
--       The sets of slots are taken from the record: they are in the same slot.
-- ARGV  1  now, ms since the epoch; "" in production: Redis TIME
--       2  the lease's token
--
-- Returns the life of the lease from now on (ms), or 0: lost.

local packed = redis.call('GET', KEYS[1])
if not packed then return 0 end
-- The fields of release.lua; what a later version wrote behind them is kept.
local record = {cmsgpack.unpack(packed)}
check_format(record[1])
local life, expiry = record[2], record[4]
if expiry <= now then return 0 end

-- Somebody else may have got a slot that is not there any more, or has expired: one
-- that lingers may do so before the lease.
local last = 4 -- of the slots
while type(record[last + 1]) == 'string' do
  local till = tonumber(redis.call('ZSCORE', record[last + 1], ARGV[2]) or 0)
  if till <= now then return 0 end
  last = last + 2
end
local stream = record[last + 2]
local holding = holds(stream, ARGV[2])

-- Never shorter: time may have been set back since.
record[1] = WRITES
record[4] = max(expiry, now + life)
life = record[4] - now
for i = 5, last, 2 do
  redis.call('ZADD', record[i], record[4], ARGV[2])
  extend(record[i], life + SLACK)
end
redis.call('ZADD', KEYS[2], record[4], ARGV[2])
extend(KEYS[2], life + INDEX_SLACK)
if holding then know(stream, HOLDING, record[4] + RECORD_SLACK, ARGV[2]) end
redis.call('SET', KEYS[1], cmsgpack.pack(unpack(record)), 'PX', life + RECORD_SLACK)
return life
