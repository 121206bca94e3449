#!lua flags=allow-oom
-- release.lua ends a lease: the first release of a live lease frees the slots
-- that its record names, and no others.
--
-- KEYS  1  the lease's record
--       2  the domain's index of leases
--       The sets of slots are taken from the record: they are in the same slot.
-- ARGV  1  now, ms since the epoch; "" in production: Redis TIME
--       2  the lease's token
--       3  "1" if the decision that would grant the lease may still be under way:
--          a lease that is not there is then marked, so that it never will be
--
-- Returns {1 released, 2 not held or 3 expired; of a released one also the ms
-- that it was held, and the names of the limits whose slots it held}.

local packed = redis.call('GET', KEYS[1])
if not packed then
  if ARGV[3] == '1' then
    -- A record of a lease that ended at the epoch: nothing finds it held.
    redis.call('SET', KEYS[1], cmsgpack.pack(WRITES, 0, 0, 0), 'PX', RECORD_SLACK)
  end
  return {2}
end
-- format, life, granted, expiry, then key and limit's name of each slot. What a
-- later version wrote behind them begins with something that is no text.
local record = {cmsgpack.unpack(packed)}
check_format(record[1])
local granted, expiry = record[3], record[4]
if expiry <= now then
  -- A key's presence proves nothing: compare times.
  if now < expiry + RECORD_SLACK then return {3} end
  return {2}
end

local reply = {1, max(0, now - granted)}
local i = 5
while type(record[i]) == 'string' do
  redis.call('ZREM', record[i], ARGV[2])
  reply[#reply + 1] = record[i + 1]
  i = i + 2
end
redis.call('ZREM', KEYS[2], ARGV[2])
redis.call('DEL', KEYS[1])
return reply
