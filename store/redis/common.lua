-- common.lua stands in every script, behind its first line.
--
-- ARGV  1  now, ms since the epoch; "" in production: Redis TIME

-- The formats of states that are read, up to READS, and the one that is written:
-- docs/decisions/0007-state-formats.md.
local READS, WRITES = 1, 1
local MAX_EXACT = 9007199254740991 -- 2^53 - 1
local SLACK = 10000                -- ms that a key outlives its meaning
local RECORD_SLACK = 60000         -- ms that a lease's record outlives the lease
local INDEX_SLACK = 3600000        -- ms that the index waits to be cleaned

local min, max, fmod = math.min, math.max, math.fmod

local now = tonumber(ARGV[1])
if not now then
  local time = redis.call('TIME')
  now = time[1] * 1000 + math.floor(time[2] / 1000)
end

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
