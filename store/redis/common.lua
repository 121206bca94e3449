-- common.lua stands in every script.
--
-- KEYS  of the first item of the call, and then of the next
-- ARGV  1      now, ms since the epoch; "" in production: Redis TIME
--       2..n   an item each, in MessagePack: how many of KEYS are its own, and its arguments; or if
--              they are too many for Lua's stack, an array of both
--
-- Returns for each item its reply, an array in MessagePack, or its error, a string. Items are as calls
-- one after the other, at one instant; one that fails changes nothing of the others'.

-- The formats of states that are read, up to READS, and the one that is written:
-- docs/decisions/0007-state-formats.md.
local READS, WRITES = 1, 1
local MAX_EXACT = 9007199254740991 -- 2^53 - 1
local SLACK = 10000                -- ms that a key outlives its meaning

local min, max, fmod = math.min, math.max, math.fmod
local call, pack = redis.call, cmsgpack.pack

local now = tonumber(ARGV[1])
if not now then
  local time = call('TIME')
  now = time[1] * 1000 + math.floor(time[2] / 1000)
end

-- What a state is, or a record, or what is known of a stream.
local function pack_state(...) return pack(WRITES, ...) end

-- Redis takes ten times as long to print a number that is none of Lua's strings.
local function write(key, value, ms) call('SET', key, value, 'PX', string.format('%d', ms)) end

-- a / b for 0 <= a, 0 < b; both exact, where a floor of the quotient is not.
local function floor_div(a, b) return (a - fmod(a, b)) / b end
local function ceil_div(a, b)
  local r = fmod(a, b)
  if r > 0 then return (a - r) / b + 1 end
  return a / b
end

local function check_format(format)
  format = tonumber(format) or 0
  if format < 1 or format > READS then error('weir: state of format ' .. format .. ', and only 1 to ' .. READS .. ' is known') end
end

-- What a later version wrote behind the fields that are known is left out.
local function unpack_state(packed)
  local format, a, b, c, d, e = cmsgpack.unpack(packed)
  if format ~= WRITES then check_format(format) end
  return a, b, c, d, e
end

-- The keys of items before this one.
local before = 0

local function item(run, keys, ...)
  local at = before
  before = at + keys
  return pcall(run, at, keys, ...)
end

-- The arguments of an item, behind how many keys it has.
local function list(keys, first, ...)
  if type(first) == 'table' then return first end
  return {keys, first, ...}
end

-- Runs run(at, keys, ...) for each item: its keys are KEYS[at + 1] to KEYS[at + keys], and the rest
-- its arguments. It returns the reply, packed or as a table; a text that is packed is an error.
local function each(run)
  local replies = {}
  for i = 2, #ARGV do
    local ok, reply = item(run, cmsgpack.unpack(ARGV[i]))
    if not ok then
      -- An error of Redis' own begins with its code.
      reply = type(reply) == 'table' and reply.err or tostring(reply)
      if not string.find(reply, '^%u+ ') then reply = 'ERR ' .. reply end
      reply = pack(reply)
    elseif type(reply) == 'table' then
      reply = pack(reply)
    end
    replies[i - 1] = reply
  end
  return replies
end
