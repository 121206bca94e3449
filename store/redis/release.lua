#!lua flags=allow-oom
-- release.lua ends a lease: the first release of a live lease frees the slots
-- that its record names, and no others.
--
-- KEYS  1  the lease's record; or what is known of the stream that holds it
--       2  the domain's index of leases
--       The sets of slots are taken from the record, and of a stream the record from
--       what is known of it: they are in the same slot.
-- ARGV  1  now, ms since the epoch; "" in production: Redis TIME
--       2  the lease's token; "" to find it by its stream
--       3  "1" if the decision that would grant the lease may still be under way:
--          a lease that is not there is then marked, so that it never will be, and a
--          stream of which nothing is known gets a tombstone
--       4  "1" if the work ended before its upstream answered: slots may linger
--       5  by stream: what the names of the domain's records begin with
--
-- Returns {1 released, 2 not held, 3 expired or 4 lingering; of a lease that was held
-- also the ms that it was, and for each slot that is free now its key and the name of
-- its limit}.

local TOMBSTONE_LIFE = 30000

local record_key, token, early = KEYS[1], ARGV[2], ARGV[4] == '1'
if token == '' then
  local kind, _, holder = stream_at(redis.call('GET', KEYS[1]))
  if not kind and ARGV[3] == '1' then know(KEYS[1], TOMBSTONE, now + TOMBSTONE_LIFE, '') end
  if kind ~= HOLDING then return {2} end
  record_key, token = ARGV[5] .. holder, holder
end

local packed = redis.call('GET', record_key)
if not packed then
  if ARGV[3] == '1' and ARGV[2] ~= '' then
    -- A record of a lease that ended at the epoch: nothing finds it held.
    redis.call('SET', record_key, cmsgpack.pack(WRITES, 0, 0, 0), 'PX', RECORD_SLACK)
  end
  return {2}
end
-- format, life, granted, expiry, then key and limit's name of each slot. Behind them
-- comes something that is no text: 0, or 1 if the lease lingers, its stream, and the
-- linger of each slot.
local record = {cmsgpack.unpack(packed)}
check_format(record[1])
local granted, expiry = record[3], record[4]
local behind = 5
while type(record[behind]) == 'string' do behind = behind + 2 end
local stream = record[behind + 1]

-- A key's presence proves nothing: compare times.
if now >= expiry + RECORD_SLACK then return {2} end
if early and record[behind] == 1 and expiry > now then return {2} end -- told again

-- The last that may be of a format that is not known: nothing is written before it.
if holds(stream, token) then know(stream, ENDED, now + RECORD_SLACK, '') end
if expiry <= now then return {3} end

local reply = {1, max(0, now - granted)}
local rest, lingers, till = {WRITES, record[2], granted, 0}, {}, 0
for i = 5, behind - 2, 2 do
  local linger = early and tonumber(record[behind + 2 + (i - 5) / 2]) or 0
  if linger > 0 then
    redis.call('ZADD', record[i], now + linger, token)
    extend(record[i], linger + SLACK)
    rest[#rest + 1], rest[#rest + 2] = record[i], record[i + 1]
    lingers[#lingers + 1] = linger
    till = max(till, now + linger)
  else
    redis.call('ZREM', record[i], token)
    reply[#reply + 1], reply[#reply + 2] = record[i], record[i + 1]
  end
end
if till == 0 then
  redis.call('ZREM', KEYS[2], token)
  redis.call('DEL', record_key)
  return reply
end
reply[1], rest[4] = 4, till
rest[#rest + 1], rest[#rest + 2] = 1, stream
for _, ms in ipairs(lingers) do rest[#rest + 1] = ms end
redis.call('SET', record_key, cmsgpack.pack(unpack(rest)), 'PX', till - now + RECORD_SLACK)
redis.call('ZADD', KEYS[2], till, token)
extend(KEYS[2], till - now + INDEX_SLACK)
return reply
