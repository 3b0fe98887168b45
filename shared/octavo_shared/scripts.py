"""The Lua scripts of the log: whatever must happen at once or not at all.

A request is a hash, ``request:<id>``, with these fields:

* ``entry``: id of its entry in the model stream; there exactly while the request is owed an end.
* ``record``: what stood in that entry, once it is deleted.
* ``followers``: ``<generation> <gateway>=<generation> ...``: the last generation that was given, then every gateway whose
  clients follow the request, or may still come back, with the last one of its own. Not there before anybody has come or gone:
  then it is the gateway alone that the request is named after, under generation 0.
* ``end``: its final state as a snapshot entry, once that is no longer in the log.

It has no life time while it is owed an end, and runs out by itself afterwards.
"""

from __future__ import annotations

# KEYS: the model stream, each request of an answer, perhaps an idempotency key. ARGV: how many requests, the first one's id,
# each one's entry. Set-if-absent on the key, then on each request (rule L6). Returns the first id of whoever holds the place.
ADMIT = """
local count = tonumber(ARGV[1])
local key = KEYS[count + 2]
if key then
  local first = redis.call('GET', key)
  if first then return first end
  redis.call('SET', key, ARGV[2])
end
for i = 1, count do
  if redis.call('EXISTS', KEYS[i + 1]) == 0 then
    redis.call('HSET', KEYS[i + 1], 'entry', redis.call('XADD', KEYS[1], '*', 'e', ARGV[i + 2]))
  end
end
return ARGV[2]
"""

# A request that Redis may have lost, with what its gateway has delivered of it. KEYS: the model stream, the request, its log,
# perhaps its idempotency key. ARGV: the entry, the snapshot ('' = none), the answer's first id. Returns whether it was lost.
READMIT = """
if ARGV[2] ~= '' then redis.call('XADD', KEYS[3], '*', 'e', ARGV[2]) end
if redis.call('EXISTS', KEYS[2]) == 1 then return 0 end
if KEYS[4] then redis.call('SET', KEYS[4], ARGV[3], 'NX') end
redis.call('HSET', KEYS[2], 'entry', redis.call('XADD', KEYS[1], '*', 'e', ARGV[1]))
return 1
"""

# Acknowledge and delete an entry, unless somebody else holds the scheduler's lease by now. KEYS: the model stream, the lease,
# the requests of the answer, perhaps their idempotency key. ARGV: the consumer group, the entry, who is to hold the lease
# ('' = no matter), how many requests, which of them it is, how long the answer is kept (ms), its first id. The life times
# begin with the last of them.
FINISH = """
if ARGV[3] ~= '' and redis.call('GET', KEYS[2]) ~= ARGV[3] then return 0 end
local entry = redis.call('XRANGE', KEYS[1], ARGV[2], ARGV[2])[1]
redis.call('XACK', KEYS[1], ARGV[1], ARGV[2])
redis.call('XDEL', KEYS[1], ARGV[2])
local count = tonumber(ARGV[4] or '0')
if count == 0 then return 1 end
local own = KEYS[2 + ARGV[5]]
if entry and redis.call('EXISTS', own) == 1 then redis.call('HSET', own, 'record', entry[2][2]) end
redis.call('HDEL', own, 'entry')
for i = 3, 2 + count do
  if redis.call('HEXISTS', KEYS[i], 'entry') == 1 then return 1 end
end
for i = 3, 2 + count do redis.call('PEXPIRE', KEYS[i], ARGV[6]) end
local key = KEYS[3 + count]
if key and redis.call('GET', key) == ARGV[7] then redis.call('PEXPIRE', key, ARGV[6]) end
return 1
"""

# KEYS: the model stream, the request. Returns its record, followers and end ('' where there is none), and whether it is owed one.
LOOK_UP = """
local fields = redis.call('HMGET', KEYS[2], 'entry', 'record', 'followers', 'end')
local record = fields[2]
if fields[1] then
  local entry = redis.call('XRANGE', KEYS[1], fields[1], fields[1])[1]
  record = entry and entry[2][2] or record
end
return {record or '', fields[3] or '', fields[4] or '', fields[1] and 1 or 0}
"""

# Of a request: the last generation given, that of one gateway's clients if it is among the followers, and the other followers.
# What begins with no generation (it has 32 bits) is as good as not there.
_FOLLOWERS = """
local function followers(key, log, gateway)
  local all = redis.call('HGET', key, 'followers') or ''
  local last = tonumber(string.match(all .. ' ', '^(%d+) '))
  if not last or last >= 4294967295 then last, all = 0, '0 ' .. log .. '=0' end
  local own, others = nil, ''
  for name, generation in string.gmatch(all, ' (%S+)=(%d+)') do
    if name == gateway then own = tonumber(generation) else others = others .. ' ' .. name .. '=' .. generation end
  end
  return last, own, others
end
"""

# KEYS: the abort stream, each request of an answer. ARGV: the new generation, the one under which the gateway's clients follow
# them, the gateway, the log of the requests, and what to tell the scheduler about each. Returns the generation there was if it
# is not smaller, else 0. Requests that have ended have no followers.
FOLLOW = (
    _FOLLOWERS
    + """
for i = 2, #KEYS do
  local last = followers(KEYS[i], ARGV[4], ARGV[3])
  if last >= tonumber(ARGV[1]) then return last end
end
for i = 2, #KEYS do
  if redis.call('HEXISTS', KEYS[i], 'entry') == 1 then
    local _, own, others = followers(KEYS[i], ARGV[4], ARGV[3])
    local generation = string.format('%.0f', math.max(own or 0, tonumber(ARGV[2])))
    redis.call('HSET', KEYS[i], 'followers', ARGV[1] .. others .. ' ' .. ARGV[3] .. '=' .. generation)
    redis.call('XADD', KEYS[1], '*', 'e', ARGV[i + 3])
  end
end
return 0
"""
)

# KEYS: the abort stream, the request. ARGV: up to which generation the gateway's clients are gone, the gateway, the log of the
# request, the abort, and the generation that this names. The abort is appended once nobody follows the request any more; it
# must name the last generation (which a Redis that was restarted may have forgotten). Returns 0 when it is, -1 when somebody
# follows, else the generation to name.
LEAVE = (
    _FOLLOWERS
    + """
local last, own, others = followers(KEYS[2], ARGV[3], ARGV[2])
local generation = tonumber(ARGV[1])
if own and own > generation then return -1 end
last = math.max(last, generation)
if redis.call('HEXISTS', KEYS[2], 'entry') == 1 then
  redis.call('HSET', KEYS[2], 'followers', string.format('%.0f', last) .. others)
end
if others ~= '' then return -1 end
if last > tonumber(ARGV[5]) then return last end
redis.call('XADD', KEYS[1], '*', 'e', ARGV[4])
return 0
"""
)

# KEYS: a log. Takes away what stands in its place and is no stream; returns 1 if there was such a thing.
CLEAR = """
local kind = redis.call('TYPE', KEYS[1]).ok
if kind == 'stream' or kind == 'none' then return 0 end
redis.call('UNLINK', KEYS[1])
return 1
"""

# KEYS: a log, requests of it that are over. ARGV: the last entry a snapshot knows of, the snapshot ('' = nothing is left),
# the final state of each of the requests. What the snapshot does not know of is put behind it once more, so that a log
# that grows all the time can be trimmed as well as one at rest. Returns the id of the snapshot, or '' without one.
TRIM = """
for i = 2, #KEYS do
  if redis.call('EXISTS', KEYS[i]) == 1 then redis.call('HSET', KEYS[i], 'end', ARGV[i + 1]) end
end
local time, sequence = string.match(ARGV[1], '^(%d+)-?(%d*)$')
local next = time .. '-' .. ((tonumber(sequence) or 0) + 1)
if ARGV[2] == '' then
  redis.call('XTRIM', KEYS[1], 'MINID', '=', next)
  return ''
end
local newer = redis.call('XRANGE', KEYS[1], next, '+')
local at = redis.call('XADD', KEYS[1], '*', 'e', ARGV[2])
for _, entry in ipairs(newer) do redis.call('XADD', KEYS[1], '*', 'e', entry[2][2]) end
redis.call('XTRIM', KEYS[1], 'MINID', '=', at)
return at
"""

# Atomic, so that two schedulers that ask at once never get the same term. A Redis that has been restarted may have forgotten
# the last ones it has given, and that it has been restarted before, or ever asked: so the first term of each of its lives is
# the time (Unix ms), and none is given twice. KEYS: the term, in which life of Redis the last one was given.
NEXT_TERM = """
local life = string.match(redis.call('INFO', 'server'), 'run_id:(%w+)')
local term = tonumber(redis.call('GET', KEYS[1]) or '0')
if redis.call('GET', KEYS[2]) ~= life then
  local now = redis.call('TIME')
  term = math.max(term, now[1] * 1000 + math.floor(now[2] / 1000))
end
redis.call('SET', KEYS[2], life)
term = math.max(term, tonumber(ARGV[1])) + 1
redis.call('SET', KEYS[1], string.format('%.0f', term))
return term
"""

# Take a lease that is free or one's own already: the answer to an earlier try may have been lost. What never runs out is none,
# whoever put it there; nobody would ever be the scheduler again.
TAKE = """
if redis.call('PTTL', KEYS[1]) == -1 then redis.call('UNLINK', KEYS[1]) end
if redis.call('SET', KEYS[1], ARGV[1], 'NX', 'PX', ARGV[2]) then return 1 end
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
return redis.call('PEXPIRE', KEYS[1], ARGV[2])
"""

# Renew or release a lease, but only one's own.
RENEW = (
    "if redis.pcall('GET', KEYS[1]) == ARGV[1] then return redis.call('PEXPIRE', KEYS[1], ARGV[2]) else return 0 end"
)
RELEASE = "if redis.pcall('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) else return 0 end"
