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

local VERSION = 1
local SLACK = 10000 -- as in decide.lua
local RECORD_SLACK = 60000
local INDEX_SLACK = 3600000

local now = tonumber(ARGV[1])
if not now then
  local time = redis.call('TIME')
  now = time[1] * 1000 + math.floor(time[2] / 1000)
end

local packed = redis.call('GET', KEYS[1])
if not packed then return 0 end
local record = {cmsgpack.unpack(packed)}
if record[1] ~= VERSION then error('weir: state of unknown version') end
local life, expiry = record[2], record[4]
if expiry <= now then return 0 end

-- Somebody else may have got a slot that is not there any more.
for i = 5, #record, 2 do
  if not redis.call('ZSCORE', record[i], ARGV[2]) then return 0 end
end

local function keep(key, ms)
  if redis.call('PEXPIRE', key, ms, 'GT') == 0 then redis.call('PEXPIRE', key, ms, 'NX') end
end
-- Never shorter: time may have been set back since.
record[4] = math.max(expiry, now + life)
life = record[4] - now
for i = 5, #record, 2 do
  redis.call('ZADD', record[i], record[4], ARGV[2])
  keep(record[i], life + SLACK)
end
redis.call('ZADD', KEYS[2], record[4], ARGV[2])
keep(KEYS[2], life + INDEX_SLACK)
redis.call('SET', KEYS[1], cmsgpack.pack(unpack(record)), 'PX', life + RECORD_SLACK)
return life
