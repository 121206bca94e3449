#!lua
-- decide.lua decides all checks of a request at one instant: all that passed are charged,
-- or none is; and one request of the call after the other. The arithmetic is limit/state.go
-- and window.go, line for line; all numbers are whole and below 2^53, so doubles hold them
-- exactly.
--
-- The call is as each in common.lua says, and of a request
-- keys  1..n       the states of the checks, each once
--       n+1, n+2   the lease's record and the domain's index of leases; only
--                  with a lease
--       n+3        what is known of the stream or the operation; only with one
--       The record of the lease that an operation holds is in the same slot.
-- args  2          the lease's token; "" without a lease
--       3          "s" with a stream, "o" with an operation, else ""
--       then, with an operation, what it asks, and the number of the attempt (0: none)
--       then 10 a check:
--         kind     b (token bucket), w (window), s (sliding window) or c (concurrency)
--         key      index into keys
--         hits     -2^53 < hits < 2^53; negative refunds
--         mode     "" enforced, "s" shadow, else a quota group
--         b:       capacity (tokens), scale (units a token), refill (units a ms)
--         w, s:    max (hits), length (ms), 1 to charge it when over, else 0
--         c:       max (slots), life of a lease (ms), linger (ms)
--         reserve  how long what a bucket or a window is charged is reserved (ms); 0: not
--         name     of the limit, if it is concurrency or reserves; else ""
--         packed   b: capacity, scale and refill once more, as its state has them; else ""
--
-- The reply is {admitted (1; 0; 2: refused, since its stream had ended; 3: told again what
-- the operation holds), leases found expired, life of the lease (ms; 0: no lease), then 4 a
-- check: passed (1, 0), remaining, retry after (ms), reset after (ms)}; and if it was told
-- again the token of the lease. {4} if the operation asked for something else, {5} if
-- the attempt is late.
--
-- Everything of a request is read and evaluated before its first write, and every write is
-- one that cannot fail, since an error does not roll back. What requests write to states and
-- sets of slots is known to those behind them at once, and sent to Redis at the end: once for
-- each key, however many have charged it.

-- include common.lua
-- include bucket.lua

local FORMAT = string.char(WRITES)

-- A bucket's state. A limit is packed by the caller: it is the same for many subjects.
local function pack_bucket(level, limit, millis) return FORMAT .. pack(level) .. limit .. pack(millis) end

-- Strings, by key, as they are now. What is not there is looked for once more: it may be of
-- another type, which is an error.
local strings, lives = {}, {} -- lives: how long (ms) those live that are to be written
local there = #KEYS > 0 and call('MGET', unpack(KEYS)) or {}
for i, key in ipairs(KEYS) do strings[key] = there[i] end

local function get(key)
  local value = strings[key]
  if not value then
    value = call('GET', key)
    strings[key] = value
  end
  return value
end

local function put(key, value, ms) strings[key], lives[key] = value, ms end

-- Sets of slots, by key: how many members, how many of them are expired and stay for now, how many
-- expired are to be removed; new members (score, member, ...), for how long (ms) the set must live, and
-- how many members it had before them all.
local sets = {}

local function flush()
  for key, ms in pairs(lives) do write(key, strings[key], ms) end
  for key, s in pairs(sets) do
    if s.reap > 0 then call('ZREMRANGEBYRANK', key, 0, s.reap - 1) end
    if s.new then
      call('ZADD', key, unpack(s.new))
      if s.reap >= s.before then -- it is made anew, and has no expiry yet
        call('PEXPIRE', key, s.life)
      else
        call('PEXPIRE', key, s.life, 'GT')
      end
    end
  end
end

local function bucket_passes(level, capacity, scale, hits)
  return hits < 0 or hits <= capacity and level >= hits * scale
end

-- BucketState.Charge
local function charged(level, capacity, scale, hits)
  if hits < -floor_div(MAX_EXACT, scale) then return capacity * scale end -- more than any debt
  return min(capacity * scale, level - hits * scale)
end

-- What is told of a bucket that is as it will be: remaining, retry after, reset after.
local function told_of_bucket(level, millis, capacity, scale, refill, hits, passed)
  local ahead, remaining, retry = millis - now, 0, 0
  if level > 0 then remaining = floor_div(level, scale) end
  if not passed and hits <= capacity then retry = ahead + ceil_div(max(0, hits * scale - level), refill) end
  return remaining, retry, ahead + ceil_div(capacity * scale - level, refill)
end

-- What decide below does, for one bucket alone, as most requests ask.
local function decide_bucket(key, hits, capacity, scale, refill, limit)
  local level, millis, write = bucket_at(get(key), capacity, scale, refill)
  local passed = bucket_passes(level, capacity, scale, hits)
  if passed and hits ~= 0 then level, write = charged(level, capacity, scale, hits), true end
  local remaining, retry, reset = told_of_bucket(level, millis, capacity, scale, refill, hits, passed)
  if write then put(key, pack_bucket(level, limit, millis), reset + SLACK) end
  return (passed and '\151\1\0\0\1' or '\151\0\0\0\0') .. pack(remaining, retry, reset) -- an array of 7
end

-- Makes decide, which decides any request. It is made when a call has one that is not for one bucket alone:
-- of 30 functions to make Redis would feel the time.
local function make()
-- include decide_any.lua
return decide
end

local decide = nil
local replies = each(function(at, keys, token, with, kind, k, hits, mode, x, y, z, reserve, name, packed, more, ...)
  if more == nil and kind == 'b' and mode == '' and token == '' and with == '' then
    return decide_bucket(KEYS[at + 1], hits, x, y, z, packed)
  end
  decide = decide or make()
  return decide(at, list(keys, token, with, kind, k, hits, mode, x, y, z, reserve, name, packed, more, ...))
end)
local ok, err = pcall(flush)
if not ok then error('weir: half written: ' .. (type(err) == 'table' and err.err or tostring(err))) end
return replies
