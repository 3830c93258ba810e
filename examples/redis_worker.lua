-- The Redis side of redis_worker.py. Each command of the worker is one call of this script, which runs atomically.
--
--   KEYS[1]   the stream of requests
--   ARGV      the command, the group, the consumer, and the arguments of the command
--
-- An entry belongs to the worker that it was delivered to last. The delivery count identifies a worker that was frozen
-- while another one had the entry, even if both have the same name.

local stream, command, group, consumer = KEYS[1], ARGV[1], ARGV[2], ARGV[3]

local function delivery(entry)
    local pending = redis.call('XPENDING', stream, group, entry, entry, 1)[1]
    if pending then return pending[2], pending[4] end
end

local function belongs_to_caller(entry, deliveries)
    local owner, count = delivery(entry)
    return owner == consumer and count == tonumber(deliveries)
end

local commands = {}

-- make_group
function commands.make_group()
    redis.pcall('XGROUP', 'CREATE', stream, group, '0', 'MKSTREAM')     -- fails if it exists
end

-- write ENTRY DELIVERIES NUM_BEFORE ANSWER SECONDS_TO_KEEP [TOKEN ...]
-- Appends tokens that follow the first NUM_BEFORE tokens, and the answer unless it is empty. Returns the number of
-- stored tokens; false: the entry does not belong to the caller. The id of an item is 0-(number of tokens up to it), so
-- tokens that are sent again, because a reply was lost, are skipped.
function commands.write()
    local entry, deliveries, num_before, answer, seconds_to_keep = unpack(ARGV, 4, 8)
    if not belongs_to_caller(entry, deliveries) then return false end
    local tokens = stream .. ':tokens:' .. entry
    local last = redis.call('XREVRANGE', tokens, '+', '-', 'COUNT', 1)[1]
    local num_there, num_whole = last and tonumber(last[1]:match('%d+$')) or 0, num_before + #ARGV - 8
    if num_there < tonumber(num_before) then return num_there end
    if num_there < num_whole then
        local missing = table.concat(ARGV, ' ', 9 + num_there - num_before)
        redis.call('XADD', tokens, '0-' .. num_whole, 'tokens', missing)
    end
    if answer ~= '' then
        redis.call('XADD', tokens, '1-0', 'answer', answer)
        redis.call('EXPIRE', tokens, seconds_to_keep)
        redis.call('XADD', stream .. ':answers', '*', 'entry', entry, 'answer', answer)
        redis.call('XACK', stream, group, entry)
        redis.call('XDEL', stream, entry)
        redis.call('DEL', stream .. ':cancel:' .. entry)
    end
    return num_whole
end

-- set_idle MILLISECONDS [ENTRY DELIVERIES ...]
-- Sets the idle time of the caller's entries: 0 renews the lease; the length of the lease releases them to others.
function commands.set_idle()
    for i = 5, #ARGV, 2 do
        if belongs_to_caller(ARGV[i], ARGV[i + 1]) then
            redis.call('XCLAIM', stream, group, consumer, 0, ARGV[i], 'IDLE', ARGV[4], 'JUSTID')
        end
    end
end

-- claim MILLISECONDS CURSOR COUNT
-- Claims entries that have been idle for that long. Returns the next cursor and, for each entry,
-- {id, fields, deliveries, items of its token stream}.
function commands.claim()
    local reply = redis.call('XAUTOCLAIM', stream, group, consumer, ARGV[4], ARGV[5], 'COUNT', ARGV[6])
    for _, entry in ipairs(reply[2]) do
        local _, deliveries = delivery(entry[1])
        entry[3], entry[4] = deliveries, redis.call('XRANGE', stream .. ':tokens:' .. entry[1], '-', '+')
    end
    return {reply[1], reply[2]}
end

return commands[command]()
