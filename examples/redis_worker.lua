-- What redis_worker.py does in Redis: one command of the worker is one script, which runs whole or not at all.
--
--   KEYS[1]   the stream of requests
--   ARGV      the command, the group, the consumer, and what the command takes
--
-- An entry belongs to who got it last. Redis counts its deliveries, so a worker that was frozen while another one had
-- the entry is told apart, even where both have one name.

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
    redis.pcall('XGROUP', 'CREATE', stream, group, '0', 'MKSTREAM')     -- fails where it is there already
end

-- write ENTRY DELIVERIES NUM_BEFORE ANSWER SECONDS_TO_KEEP [TOKEN ...]
-- Adds the tokens, which come after NUM_BEFORE others, and the answer unless it is empty. Returns how many tokens are
-- there now; false: the entry is not the caller's. The id of a piece is 0-(tokens with it), so tokens that come again,
-- because a reply was lost, are left out.
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
-- Says for how long nothing was heard of the caller's entries: 0 keeps them, a lease leaves them to others.
function commands.set_idle()
    for i = 5, #ARGV, 2 do
        if belongs_to_caller(ARGV[i], ARGV[i + 1]) then
            redis.call('XCLAIM', stream, group, consumer, 0, ARGV[i], 'IDLE', ARGV[4], 'JUSTID')
        end
    end
end

-- claim MILLISECONDS CURSOR COUNT
-- Takes entries of which nothing was heard for that long. Returns the next cursor and, of each entry,
-- {id, fields, deliveries, pieces of tokens}.
function commands.claim()
    local reply = redis.call('XAUTOCLAIM', stream, group, consumer, ARGV[4], ARGV[5], 'COUNT', ARGV[6])
    for _, entry in ipairs(reply[2]) do
        local _, deliveries = delivery(entry[1])
        entry[3], entry[4] = deliveries, redis.call('XRANGE', stream .. ':tokens:' .. entry[1], '-', '+')
    end
    return {reply[1], reply[2]}
end

return commands[command]()
