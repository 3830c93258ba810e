"""A plain model of the scheduling and KV cache rules of the conformance records.

It shares no code with batch_manager and takes no shortcuts. Blocks are objects in lists, the list of free blocks is
searched from its beginning, prefixes are compared token by token, and every estimate is written out as a formula. The
model has the same module-level functions as `adapter.py`, so that tests can run records with either of them.
`test_schema_differential.py` compares the two.

Times are milliseconds. Requests and configurations are the dictionaries of the records.
"""

import copy
from dataclasses import dataclass, field

STATES = ["UNKNOWN", "ENCODER_INIT", "CONTEXT_INIT", "GENERATION_IN_PROGRESS", "GENERATION_TO_COMPLETE",
          "GENERATION_COMPLETE"]
DEFAULT_PRIORITY = 35
LOWEST_OFFLOADABLE_PRIORITY = 30
NO_LIMIT = 10**9


class OutOfBlocks(Exception):
    pass


class Duplicate(Exception):
    pass


class Undefined(Exception):
    """Raised for a case whose result the rules do not define."""


def ceil_div(number: int, by: int) -> int:
    return -(-number // by)


# Requests


@dataclass(eq=False)
class Request:
    id: int
    prompt: list[int]
    max_new_tokens: int
    beam_width: int = 1
    draft_len: int = 0
    priority: float = 0.5
    lora_task: int | None = None
    cache_salt: int | None = None
    token_extra_ids: list[int] | None = None
    retention: dict | None = None
    state: str = "CONTEXT_INIT"
    context_position: int = 0
    generated: int = 0
    context_chunk: int | None = None
    credit: int = 0
    chunk: int = 0
    generation_draft_len: int | None = None

    @property
    def prompt_len(self) -> int:
        return len(self.prompt)

    @property
    def remaining(self) -> int:
        return self.prompt_len - self.context_position

    @property
    def is_context(self) -> bool:
        return self.state == "CONTEXT_INIT"

    @property
    def is_generating(self) -> bool:
        return self.state in ("GENERATION_IN_PROGRESS", "GENERATION_TO_COMPLETE")

    @property
    def is_first_chunk(self) -> bool:
        return self.is_context and self.context_position == 0

    @property
    def is_schedulable(self) -> bool:
        return STATES.index("CONTEXT_INIT") <= STATES.index(self.state) < STATES.index("GENERATION_COMPLETE")

    @property
    def is_started(self) -> bool:
        return self.is_schedulable and (self.is_generating or self.context_position > 0)

    def pause(self, max_input_len: int) -> None:
        if self.beam_width == 1:
            length = min(max_input_len, self.prompt_len + self.generated)
            self.max_new_tokens -= length - self.prompt_len
            self.prompt = (self.prompt + [0] * self.generated)[:length]
        self.generated = self.context_position = 0
        self.state = "CONTEXT_INIT"
        self.context_chunk = None


def make_request(record: dict) -> Request:
    prompt = record.get("prompt_tokens") or record.get("tokens") or [0] * record["prompt_len"]
    request = Request(record.get("id", 0), list(prompt), record.get("max_new_tokens", 1), record.get("beam_width", 1),
                      record.get("draft_len", 0), record.get("priority", 0.5), record.get("lora_task"),
                      record.get("cache_salt"), record.get("token_extra_ids"), record.get("retention"),
                      record.get("state", "CONTEXT_INIT"), record.get("context_position", 0),
                      record.get("generated", 0), record.get("context_chunk"),
                      record.get("estimated_reusable_tokens", 0),
                      generation_draft_len=record.get("generation_draft_len"))
    if request.is_generating:
        request.context_position = request.prompt_len
    return request


def request_pause(record: dict, steps: list[dict]) -> dict:
    request, results = make_request(record), []
    for step in steps:
        request.generated += step.get("generated", step.get("generate", 0))
        request.pause(step.get("pause_max_input_len", step.get("max_input_len", NO_LIMIT)))
        results.append({"prompt_len": request.prompt_len, "max_new_tokens": request.max_new_tokens,
                        "generated": request.generated, "context_position": request.context_position,
                        "state": request.state})
    return {"after_pause": results}


def insert(active: list[Request], request: Request, order: str) -> None:
    """Insert `request` at the end of `active`, or if `order` is "priority", before all requests of lower priority."""
    place = len(active)
    while order == "priority" and place > 0 and active[place - 1].priority < request.priority:
        place -= 1
    active.insert(place, request)


def request_order(requests: list[dict]) -> dict:
    active: list[Request] = []
    for record in requests:
        insert(active, make_request(record), "priority")
    return {"order": [request.id for request in active]}


# Retention


def has_bad_ranges(ranges: list[list]) -> bool:
    ranges = sorted(ranges, key=lambda each: each[0])
    for start, end, *_ in ranges:
        if end is not None and end <= start:
            return True
    return any(end is None or end > after[0] for (_, end, *_), after in zip(ranges, ranges[1:], strict=False))


def retention_of(ranges: list[list], position: int) -> tuple[int | None, float | None]:
    """Return (priority, duration) of a block whose first token is at `position`; (None, None) outside of `ranges`."""
    for start, end, priority, *duration in ranges:
        if start <= position and (end is None or position < end):
            return priority, duration[0] if duration else None
    return None, None


def retention_map(ranges: list[list], tokens_per_block: int | None = None, seq_len: int | None = None) -> dict:
    if has_bad_ranges(ranges):
        return {"error": True}
    if tokens_per_block is None or seq_len is None:
        return {"error": False}
    return {"priorities": [retention_of(ranges, start)[0] for start in range(0, seq_len, tokens_per_block)]}


# The free order


@dataclass(eq=False)
class Block:
    id: int
    refs: int = 0
    priority: int = DEFAULT_PRIORITY
    duration: float | None = None
    expires: float | None = None
    released: int = 0
    # its node in the prefix tree
    key: tuple | None = None
    parent: object = None
    children: list = field(default_factory=list)

    @property
    def is_cached(self) -> bool:
        return self.key is not None


class FreeOrder:
    def __init__(self, num_blocks: int) -> None:
        self.blocks = [Block(block_id) for block_id in range(num_blocks)]
        self.queues: dict[int, list[Block]] = {priority: [] for priority in range(101)}
        self.queues[DEFAULT_PRIORITY] = list(self.blocks)
        self.milliseconds = self.num_releases = 0

    @property
    def num_free(self) -> int:
        return sum(len(queue) for queue in self.queues.values())

    def first(self) -> Block:
        for priority in range(101):
            if self.queues[priority]:
                return self.queues[priority][0]
        raise OutOfBlocks

    def claim(self, block: Block, priority: int | None = None, duration: float | None = None) -> None:
        """Remove a block from the order of free blocks if it is free, and set its priority and duration.

        If `priority` is None, the block keeps its priority and duration.
        """
        if block in self.queues[block.priority]:
            self.queues[block.priority].remove(block)
        if priority is not None:
            block.priority, block.duration = priority, duration
        block.expires = None

    def release(self, block: Block, front: bool = False) -> None:
        queue = self.queues[block.priority]
        self.num_releases += 1
        block.released = self.num_releases
        queue.insert(0 if front else len(queue), block)
        runs_out = block.duration is not None and block.priority != DEFAULT_PRIORITY
        block.expires = self.milliseconds + block.duration if runs_out else None

    def demote(self, lost: list[Block]) -> None:
        """Give blocks that lost their content the default priority. TensorRT-LLM does not have this rule."""
        for block in sorted(lost, key=lambda block: block.id, reverse=True):
            if block.priority != DEFAULT_PRIORITY:
                self.queues[block.priority].remove(block)
                block.priority, block.duration, block.expires = DEFAULT_PRIORITY, None, None
                self.queues[DEFAULT_PRIORITY].insert(0, block)

    def refresh(self) -> None:
        expired = [block for queue in self.queues.values() for block in queue
                   if block.expires is not None and block.expires <= self.milliseconds]
        for block in sorted(expired, key=lambda block: (block.expires, block.released)):
            self.queues[block.priority].remove(block)
            block.priority, block.expires = DEFAULT_PRIORITY, None
            self.queues[DEFAULT_PRIORITY].append(block)


def eviction_ops(config: dict, ops: list[dict]) -> dict:
    order, named, results = FreeOrder(config["num_blocks"]), {}, []
    for op in ops:
        match op["op"]:
            case "peek":
                block = named[op["as"]] = order.first()
                results.append({"block": block.id, "offloadable": block.priority >= LOWEST_OFFLOADABLE_PRIORITY})
                continue
            case "claim":
                order.claim(named[op["block"]], op.get("priority"), op.get("duration", op.get("duration_ms")))
            case "claim_next":
                for _ in range(op["count"]):
                    order.claim(order.first())
            case "release":
                order.release(named[op["block"]], op.get("front", False))
            case "advance_time":
                order.milliseconds += op["ms"]
                results.append({})
                continue
            case "set_time":
                order.milliseconds = op["ms"]
                results.append({})
                continue
            case "refresh":
                order.refresh()
                priorities = {name: block.priority for name, block in named.items()}
                results.append({"free_blocks": order.num_free, "priorities": priorities})
                continue
        results.append({"free_blocks": order.num_free})
    return {"results": results}


# The prefix tree


def cut(tokens: list, size: int) -> list[tuple]:
    return [tuple(tokens[start:start + size]) for start in range(0, len(tokens), size)]


def common_prefix(one: tuple, other: tuple) -> int:
    length = 0
    while length < min(len(one), len(other)) and one[length] == other[length]:
        length += 1
    return length


def child_of(parent: Block, key: tuple) -> Block | None:
    return next((child for child in parent.children if child.key == key), None)


def below(block: Block) -> list[Block]:
    """Return `block` and all its descendants in the prefix tree."""
    return [block] + [other for child in block.children for other in below(child)]


def cut_off(block: Block) -> int:
    """Remove a block and its descendants from the prefix tree. Returns the number of removed blocks."""
    gone = below(block)
    block.parent.children.remove(block)
    for each in gone:
        each.key, each.parent, each.children = None, None, []
    return len(gone)


def prefix_tree_ops(config: dict, ops: list[dict]) -> dict:
    root, size, named, results = Block(-1), config["tokens_per_block"], {}, []

    def num_nodes() -> int:
        return len(below(root)) - 1

    def keys_of(op: dict) -> list[tuple]:
        domain = (op.get("lora_task"), op.get("salt", op.get("cache_salt")))
        return [(domain, tokens) for tokens in cut(op["tokens"], size)]

    for op in ops:
        before = num_nodes()
        if op["op"] == "insert":
            node = root
            for key in keys_of(op):
                found = child_of(node, key)
                if found is None:
                    found = Block(0, key=key, parent=node)
                    node.children.append(found)
                node = found
            named[op.get("as")] = node
            results.append({"new_nodes": num_nodes() - before, "nodes": num_nodes()})
        elif op["op"] == "match":
            node, matched = root, 0
            for domain, tokens in keys_of(op):
                found = child_of(node, (domain, tokens))
                if found is None:
                    siblings = [key for key in (child.key for child in node.children) if key[0] == domain]
                    if config.get("enable_partial_reuse"):
                        matched += max((common_prefix(key[1], tokens) for key in siblings), default=0)
                    break
                node = found
                matched += len(tokens)
            results.append({"matched_tokens": matched})
        else:
            removed = cut_off(named[op["node"]])
            results.append({"removed_nodes": removed, "nodes": num_nodes()})
    return {"results": results}


# The KV cache


@dataclass(eq=False)
class Sequence:
    request: Request
    tokens: list[int]  # the tokens of beam 0 that are in the cache
    length: int
    blocks: list[list[Block]] = field(default_factory=list)  # by index: one shared block, or one block per beam
    dropped: int = 0

    @property
    def held(self) -> list[list[Block]]:
        return self.blocks[self.dropped:]


class Cache:
    def __init__(self, config: dict) -> None:
        self.tokens_per_block: int = config["tokens_per_block"]
        self.num_blocks: int = config["num_blocks"]
        self.max_seq_len: int = config["max_seq_len"]
        window = config.get("window")
        self.window: int = self.max_seq_len if window is None else window
        self.temporary_window: int = config.get("temporary_attention_window", 0)
        self.bubble = -config.get("sink_token_length", 0) % self.tokens_per_block
        self.reuse: bool = config.get("enable_block_reuse", False) and not config.get("sink_token_length", 0)
        self.partial_reuse: bool = config.get("enable_partial_reuse", True)
        self.order = FreeOrder(self.num_blocks)
        self.root = Block(-1)
        self.sequences: dict[int, Sequence] = {}
        self.evicted = self.reused_blocks = 0

    @property
    def free_blocks(self) -> int:
        return self.order.num_free

    # keys

    def keys(self, request: Request, tokens: list[int]) -> list[tuple]:
        """Return the key of each block of `tokens`: (domain, [(token, extra id)])."""
        extra = request.token_extra_ids
        domain = (request.lora_task, request.cache_salt, extra is not None)
        if extra is None:
            extra = [0] * len(tokens)
        extra = extra + [0] * (len(tokens) - len(extra))
        pairs = list(zip(tokens, extra, strict=False))
        return [(domain, content) for content in cut(pairs, self.tokens_per_block)]

    def best_partial_match(self, parent: Block, key: tuple) -> tuple[Block | None, int]:
        """Return (child of `parent` with the longest common prefix with `key`, length of this prefix).

        The rules do not decide between children with equal lengths. The model takes the child nearest to `key` in
        lexical order, and prefers smaller children.
        """
        domain, content = key
        before = [child for child in parent.children if child.key[0] == domain and child.key[1] < content]
        behind = [child for child in parent.children if child.key[0] == domain and child.key[1] > content]
        best, longest = None, 0
        before.sort(key=lambda block: block.key[1], reverse=True)
        behind.sort(key=lambda block: block.key[1])
        for child in before + behind:
            length = common_prefix(child.key[1], content)
            if length > longest:
                best, longest = child, length
        return best, longest

    # blocks

    def take_free(self, priority: int | None, duration: float | None) -> Block:
        block = self.order.first()
        if block.is_cached:
            lost = [each for each in below(block) if each is not block and each.refs == 0]
            self.evicted += cut_off(block)
            self.order.demote(lost)
        self.order.claim(block, DEFAULT_PRIORITY if priority is None else priority, duration)
        block.refs = 1
        return block

    def take_copy(self, source: Block, priority: int | None, duration: float | None) -> Block:
        """Return a free block for a copy of `source`. If `source` is the only free block, take `source` itself."""
        if source.refs == 0 and self.free_blocks == 1:
            lost = [each for each in below(source) if each is not source and each.refs == 0]
            self.evicted += cut_off(source) - 1
            self.order.demote(lost)
            self.order.claim(source, priority, duration)
            source.refs = 1
            return source
        self.order.claim(source)
        source.refs += 1
        block = self.take_free(source.priority if priority is None else priority, duration)
        self.let_go(source)
        return block

    def let_go(self, block: Block, front: bool = False) -> None:
        block.refs -= 1
        if block.refs == 0:
            self.order.release(block, front)

    # sequences

    def add(self, request: Request) -> int:
        """Take blocks for the whole prompt of `request`. Returns the number of the prompt's tokens that are cached."""
        if request.id in self.sequences:
            raise Duplicate
        size, length, beams = self.tokens_per_block, request.prompt_len, request.beam_width
        num_logical = ceil_div(length, size)
        ranges = (request.retention or {}).get("ranges", [])
        last_is_private = beams > 1 and (self.reuse or length % size > 0)

        found: list[tuple[Block, int, bool]] = []
        if self.reuse:
            parent = self.root
            for number, key in enumerate(self.keys(request, request.prompt[:-1])):
                if last_is_private and number == num_logical - 1:
                    break
                exact = child_of(parent, key)
                if exact is not None and len(key[1]) == size:
                    found.append((exact, size, False))
                    parent = exact
                    continue
                if exact is not None:
                    found.append((exact, len(key[1]), True))
                elif self.partial_reuse:
                    block, matched = self.best_partial_match(parent, key)
                    if block is not None:
                        found.append((block, matched, True))
                break

        source = None  # block to copy: a partial match that is in use or has children
        if found and found[-1][2] and (found[-1][0].refs or found[-1][0].children):
            source = found[-1][0]
        whole = [block for block, _, _ in found if block is not source]
        need = num_logical - len(whole) + (beams - 1 if last_is_private else 0)
        left = self.free_blocks - sum(block.refs == 0 for block in whole)
        if need > left:
            raise OutOfBlocks

        sequence = Sequence(request, list(request.prompt), length)
        for number, block in enumerate(whole):
            self.order.claim(block, *retention_of(ranges, number * size))
            block.refs += 1
            if found[number][2]:
                cut_off(block)
            sequence.blocks.append([block])
        for number in range(len(whole), num_logical):
            priority, duration = retention_of(ranges, number * size)
            copies = beams if last_is_private and number == num_logical - 1 else 1
            if source is not None and number == len(whole):
                sequence.blocks.append([self.take_copy(source, priority, duration)])
            else:
                sequence.blocks.append([self.take_free(priority, duration) for _ in range(copies)])
        self.reused_blocks += len(found)
        self.sequences[request.id] = sequence
        return sum(matched for _, matched, _ in found)

    def append(self, sequence: Sequence, token: int) -> None:
        size, request = self.tokens_per_block, sequence.request
        if sequence.length % size == 0:
            if self.free_blocks < request.beam_width:
                raise OutOfBlocks
            retention = request.retention or {}
            priority, duration = retention.get("decode_priority"), retention.get("decode_duration")
            sequence.blocks.append([self.take_free(priority, duration) for _ in range(request.beam_width)])
        sequence.length += 1
        sequence.tokens.append(token)
        if self.window < self.max_seq_len:
            while sequence.length - sequence.dropped * size >= self.window + size:
                for block in sequence.blocks[sequence.dropped]:
                    self.let_go(block)
                sequence.dropped += 1

    def rewind(self, sequence: Sequence, count: int) -> None:
        for _ in range(count):
            sequence.length -= 1
            sequence.tokens.pop()
            if sequence.length % self.tokens_per_block == 0:
                for block in sequence.blocks.pop():
                    self.let_go(block, front=True)

    def store(self, sequence: Sequence, num_tokens: int, with_partial: bool) -> None:
        """Add the blocks of the sequence's first `num_tokens` tokens to the prefix tree.

        A block that is not full is added only if `with_partial` is true.
        """
        if not self.reuse:
            return
        node = self.root
        for number, key in enumerate(self.keys(sequence.request, sequence.tokens[:max(num_tokens, 0)])):
            if len(key[1]) < self.tokens_per_block and not with_partial:
                break
            there = child_of(node, key)
            if there is None:
                if number < sequence.dropped:
                    break
                there = sequence.blocks[number][0]
                if there.is_cached:
                    raise Undefined("a block of a sequence is cached under another key")
                there.key, there.parent = key, node
                node.children.append(there)
            node = there

    def store_context(self, sequence: Sequence, materialized: int | None = None) -> None:
        length = sequence.request.prompt_len
        computed = length if materialized is None else min(length, materialized)
        self.store(sequence, computed - 1, with_partial=False)

    def remove(self, sequence: Sequence, store: bool, num_tokens: int | None = None) -> None:
        """Release the blocks of a sequence. If `store` is true, first add its computed blocks to the prefix tree.

        num_tokens   number of tokens of the request, of which the last one is not in the KV cache
        """
        if store and sequence.request.beam_width == 1:
            self.store(sequence, num_tokens - 1, with_partial=True)
        # Beam by beam; shared blocks are released with the last beam.
        for beam in range(sequence.request.beam_width):
            for blocks in reversed(sequence.held):
                if len(blocks) > 1 or sequence.request.beam_width == 1:
                    self.let_go(blocks[beam])
                elif beam == sequence.request.beam_width - 1:
                    self.let_go(blocks[0])
        del self.sequences[sequence.request.id]

    # queries

    def matched_blocks(self, request: Request) -> list[Block]:
        """Return the full blocks of the prompt that are in the prefix tree."""
        blocks, parent = [], self.root
        if self.reuse:
            for key in self.keys(request, request.prompt):
                if len(key[1]) == self.tokens_per_block:
                    parent = child_of(parent, key)
                    if parent is None:
                        break
                    blocks.append(parent)
        return blocks

    def needed_one_step(self, request: Request, two_steps: bool) -> int:
        size, beams, window = self.tokens_per_block, request.beam_width, self.window
        if request.is_context:
            if not request.is_first_chunk:
                return 0
            length = min(request.prompt_len + request.draft_len, window + request.max_new_tokens) + self.bubble
            referenced = sum(block.refs > 0 for block in self.matched_blocks(request))
            return length // size + ceil_div(length % size, size) * beams - min(referenced, length // size)
        current = self.sequences[request.id].length
        left = request.max_new_tokens - (current - request.prompt_len)
        after = current + min((2 if two_steps else 1) * (request.draft_len + 1), left)
        if after > max(window, self.max_seq_len) + self.bubble:
            return 0
        return (ceil_div(after, size) - ceil_div(current, size)) * beams

    def remaining_to_completion(self, request: Request) -> int:
        size, beams, window = self.tokens_per_block, request.beam_width, self.window
        prompt, final = request.prompt_len, request.prompt_len + request.max_new_tokens
        cap = window + self.temporary_window
        context = (min(prompt, cap) + self.bubble) // size
        total = ceil_div(min(final, cap) + self.bubble, size)
        generation = total - context
        held = len(self.sequences[request.id].held) if request.id in self.sequences else 0
        extra = int(final > window and ceil_div(final, size) > ceil_div(prompt + request.generated, size)
                    and ceil_div(final, size) > total)
        known = 0
        if request.is_first_chunk and held == 0:
            known = min(sum(block.refs > 0 for block in self.matched_blocks(request)), context)
        if held < context - known:
            return context - known - held + (generation + extra) * beams
        if total + extra < known + held:
            raise Undefined("more blocks are held than will be needed")
        return (total - known - held + extra) * beams

    def reusable_tokens(self, request: Request, to_completion: bool) -> int:
        if not request.is_first_chunk:
            return 0
        matched = self.matched_blocks(request)
        if not to_completion:
            return self.tokens_per_block * sum(block.refs > 0 for block in matched)
        cap = self.window + self.temporary_window
        return self.tokens_per_block * min(len(matched), (min(request.prompt_len, cap) + self.bubble)
                                           // self.tokens_per_block)

    def first_missing_prefix(self, request: Request) -> tuple | None:
        """Return the keys of the prompt's full blocks up to and including the first one that is not in the prefix tree.

        If the tree has all full blocks, return None.
        """
        keys = [key for key in self.keys(request, request.prompt) if len(key[1]) == self.tokens_per_block]
        matched = len(self.matched_blocks(request))
        return tuple(keys[:matched + 1]) if matched < len(keys) else None


class Tables:
    """One KV cache, with a method for each operation of a `kv_ops` record."""

    def __init__(self, config: dict) -> None:
        self.cache = Cache(config)

    def run(self, op: dict) -> dict:
        evicted = self.cache.evicted
        try:
            result = getattr(self, op["op"])(op)
        except OutOfBlocks:
            return {"error": "out_of_blocks"}
        except Duplicate:
            return {"error": "duplicate"}
        if op["op"] == "advance_time":
            return result
        free = self.cache.free_blocks
        return result | {"used_blocks": self.cache.num_blocks - free, "free_blocks": free,
                         "cached_blocks_evicted": self.cache.evicted - evicted}

    def sequence(self, op: dict) -> Sequence:
        return self.cache.sequences[op["req"]]

    def add_sequence(self, op: dict) -> dict:
        request = make_request(op | {"id": op["req"]})
        reused = self.cache.add(request)
        blocks = self.sequence(op).blocks
        result = {"reused_tokens": reused, "num_blocks_per_beam": len(blocks)}
        if request.beam_width == 1:
            return result | {"block_ids": [block.id for [block] in blocks]}
        return result | {"distinct_blocks": sum(len(each) for each in blocks),
                         "shared_blocks": sum(len(each) == 1 for each in blocks)}

    def append_tokens(self, op: dict) -> dict:
        for token in op.get("tokens") or [0] * op["count"]:
            self.cache.append(self.sequence(op), token)
        return {"num_blocks_per_beam": len(self.sequence(op).held)}

    def store_context(self, op: dict) -> dict:
        self.cache.store_context(self.sequence(op), op.get("materialized_tokens"))
        return {}

    def remove_sequence(self, op: dict) -> dict:
        sequence = self.sequence(op)
        num_tokens = min(sequence.length, op.get("tokens_kept", NO_LIMIT), op.get("materialized_tokens", NO_LIMIT))
        self.cache.remove(sequence, op.get("store_for_reuse", False), num_tokens)
        return {}

    def rewind(self, op: dict) -> dict:
        self.cache.rewind(self.sequence(op), op["count"])
        return {}

    def advance_time(self, op: dict) -> dict:
        self.cache.order.milliseconds += op["ms"]
        return {}

    def refresh(self, op: dict) -> dict:
        self.cache.order.refresh()
        return {}

    def needed_one_step(self, op: dict) -> dict:
        request = make_request(op["request"])
        return {"blocks": self.cache.needed_one_step(request, op.get("two_step_lookahead", False)),
                "estimated_reusable_tokens": self.cache.reusable_tokens(request, to_completion=False)}

    def remaining_to_completion(self, op: dict) -> dict:
        request = make_request(op["request"])
        return {"blocks": self.cache.remaining_to_completion(request),
                "estimated_reusable_tokens": self.cache.reusable_tokens(request, to_completion=True)}

    def probe_prefix(self, op: dict) -> dict:
        matched = self.cache.matched_blocks(make_request(op.get("request", op)))
        return {"reusable_blocks_allocated": sum(block.refs > 0 for block in matched),
                "reusable_blocks_all": len(matched)}


def kv_ops(config: dict, ops: list[dict]) -> dict:
    tables = Tables(config)
    return {"results": [tables.run(op) for op in ops]}


def kv_fill(config: dict, prompt_len: int, tokens_to_add: int, mode: str) -> dict:
    cache = Cache(config)
    record = {"prompt_len": prompt_len, "max_new_tokens": tokens_to_add}
    estimate = cache.remaining_to_completion(make_request(record | {"id": -1}))
    requests = [make_request(record | {"id": number}) for number in range(cache.num_blocks // estimate)]
    for request in requests:
        cache.add(request)
    peak = cache.num_blocks - cache.free_blocks

    def grow(request: Request) -> None:
        nonlocal peak
        cache.append(cache.sequences[request.id], 0)
        peak = max(peak, cache.num_blocks - cache.free_blocks)

    if mode == "parallel":
        for _ in range(tokens_to_add):
            for request in requests:
                grow(request)
    for request in requests:
        if mode == "one_by_one":
            for _ in range(tokens_to_add):
                grow(request)
        cache.remove(cache.sequences[request.id], store=False)
    return {"blocks_per_request_estimate": estimate, "num_requests": len(requests), "peak_used_blocks": peak,
            "free_blocks_end": cache.free_blocks, "error": None}


# Capacity


class AdapterPages:
    def __init__(self, config: dict | None) -> None:
        self.config = config
        self.tasks: set[int] = set()

    def fits(self, request: Request) -> bool:
        """Whether the adapter pages suffice for the adapters of `request` and of all accepted requests.

        If the accepted requests need too many pages already, a request without an adapter does not fit either.
        """
        if self.config is None:
            return True
        tasks = self.tasks | ({request.lora_task} - {None})
        return len(tasks) * self.config["pages_per_task"] <= self.config["max_device_pages"]

    def take(self, request: Request) -> None:
        if request.lora_task is not None:
            self.tasks.add(request.lora_task)


@dataclass
class FixedNeeds:
    """A KV cache in which each request needs the same number of blocks and a pause frees no block."""

    free_blocks: int
    need: int
    reuse = False

    def needed_one_step(self, request: Request, two_steps: bool) -> int:
        return self.need

    def remaining_to_completion(self, request: Request) -> int:
        return self.need

    def blocks_freed_by(self, paused: list[Request]) -> int:
        return 0


def blocks_freed_by(cache, paused: list[Request]) -> int:
    """Return the number of blocks that become free if the `paused` requests release theirs."""
    if isinstance(cache, FixedNeeds):
        return 0
    refs: dict[Block, int] = {}
    for request in paused:
        if request.id in cache.sequences:
            for blocks in cache.sequences[request.id].held:
                for block in blocks:
                    refs[block] = refs.get(block, 0) + 1
    return sum(block.refs == count for block, count in refs.items())


def delays(config: dict, cache) -> bool:
    return cache.reuse and config["capacity_policy"] != "STATIC_BATCH"


class Duplicates:
    """The first uncached block of each context that a scheduling call runs.

    A context that needs such a block waits until the block is cached.
    """

    def __init__(self, cache, on: bool, active: list[Request]) -> None:
        self.cache, self.on = cache, on
        self.registered: set[tuple] = set()
        for request in active:
            if on and request.is_context and not request.is_first_chunk:
                self.register(request)

    def register(self, request: Request) -> None:
        self.registered.add(self.cache.first_missing_prefix(request))

    def delay(self, request: Request) -> bool:
        if not self.on or not request.is_first_chunk:
            return False
        prefix = self.cache.first_missing_prefix(request)
        if prefix is None:
            return False
        if prefix in self.registered:
            return True
        self.registered.add(prefix)
        return False


def schedule_capacity(config: dict, cache, active: list[Request]) -> tuple[list[Request], list[Request]]:
    policy, most = config["capacity_policy"], config.get("max_num_requests", NO_LIMIT)
    schedulable = [request for request in active if request.is_schedulable]
    if policy is None:
        return schedulable, []
    if policy == "MAX_REQUESTS":
        return schedulable[:most], []
    pages = AdapterPages(config.get("peft"))
    duplicates = Duplicates(cache, delays(config, cache), schedulable)
    if policy == "MAX_UTILIZATION":
        return max_utilization(config, cache, schedulable, most, pages, duplicates)
    return no_evict(policy, cache, schedulable, most, pages, duplicates)


def no_evict(policy: str, cache, schedulable, most, pages, duplicates) -> tuple[list[Request], list[Request]]:
    available, taken = cache.free_blocks, []
    for request in schedulable:
        if len(taken) >= most:
            break
        if request.is_generating:
            taken.append(request)
            available -= cache.remaining_to_completion(request)
            pages.take(request)
    if policy == "STATIC_BATCH" and taken:
        return taken, []
    for request in schedulable:
        if not request.is_context:
            continue
        if duplicates.delay(request):
            continue
        if len(taken) >= most:
            break
        need = cache.remaining_to_completion(request)
        if need > available:
            break
        if not pages.fits(request):
            continue
        taken.append(request)
        available -= need
        pages.take(request)
    return taken, []


def max_utilization(config, cache, schedulable, most, pages, duplicates) -> tuple[list[Request], list[Request]]:
    two_steps = config.get("two_step_lookahead", False)
    end, total, taken, paused = len(schedulable), 0, [], []
    place = 0
    while place < end:
        request = schedulable[place]
        if duplicates.delay(request):
            place += 1
            continue
        while True:
            need = cache.needed_one_step(request, two_steps)
            free = cache.free_blocks + blocks_freed_by(cache, paused)
            if len(taken) < most and total + need <= free and pages.fits(request):
                taken.append(request)
                total += need
                pages.take(request)
                place += 1
                break
            victims = [index for index in range(place, end) if schedulable[index].is_started]
            if not victims:
                return taken, paused
            end = victims[-1]
            paused.append(schedulable[end])
            if end == place:
                return taken, paused
    return taken, paused


def capacity_step(config: dict, requests: list[dict]) -> dict:
    cache = FixedNeeds(config.get("free_blocks", 0), config.get("blocks_per_request", 0))
    taken, paused = schedule_capacity(config, cache, [make_request(record) for record in requests])
    return {"fitting": [request.id for request in taken], "paused": [request.id for request in paused]}


# The micro batch


def credit_of(request: Request) -> int:
    return min(request.credit, request.remaining) if request.context_position == 0 else 0


def divide(policy: str, unit: int, capacity: int | None, max_context_length: int | None,
           contexts: list[Request]) -> None:
    """Set the chunk of each context within `capacity` tokens, in multiples of `unit`.

    The draft tokens of a context are cut to the room that its last chunk leaves in the last unit.
    """
    limit = NO_LIMIT if max_context_length is None else max_context_length
    room = NO_LIMIT if capacity is None else capacity
    for request in contexts:
        request.chunk = 0
    if policy == "EQUAL_PROGRESS":
        used, moved = 0, True
        while used < room and moved:
            moved = False
            for request in contexts:
                credit = credit_of(request)
                chunk = min(request.chunk + unit, request.remaining)
                cost = max(0, chunk - credit) - max(0, request.chunk - credit)
                if used + cost > room or chunk > limit:
                    continue
                moved = moved or chunk > request.chunk
                request.chunk = chunk
                used += cost
        used = sum(max(0, request.chunk - credit_of(request)) for request in contexts)
        if contexts and contexts[0].chunk < contexts[0].remaining and 0 < contexts[0].chunk <= credit_of(contexts[0]):
            raise Undefined("a chunk of the first in line that computes nothing")
    elif policy == "FIRST_COME_FIRST_SERVED":
        left = room
        for request in contexts:
            credit = credit_of(request)
            chunk = request.remaining
            if min(chunk, request.remaining - credit) > left:
                chunk = left
            chunk = min(chunk, limit + credit)
            if chunk < request.remaining:
                chunk = chunk // unit * unit
            request.chunk = chunk
            left -= min(chunk, request.remaining - credit)
        used = room - left
    else:
        if max_context_length is not None and max_context_length < unit:
            raise ValueError("max_context_length below the unit of FORCE_CHUNK")
        used = 0
        for request in contexts:
            chunk = min(request.remaining, unit)
            if used + chunk > room:
                continue
            request.chunk = chunk
            used += chunk
    for request in contexts:
        if request.chunk and request.chunk == request.remaining and request.draft_len:
            space = min(-request.chunk % unit, limit - request.chunk, room - used)
            request.draft_len = min(request.draft_len, max(space, 0))
            used += request.draft_len


def schedule_micro_batch(config: dict, fitting: list[Request],
                         inflight: set[int]) -> tuple[list[Request], list[Request]]:
    """Choose the requests of a micro-batch. Returns (contexts with their chunks set, generation requests)."""
    budget = NO_LIMIT if config.get("max_num_tokens") is None else config["max_num_tokens"]
    limit, chunking = config.get("max_context_length"), config.get("chunking")
    contexts, generation, aside = [], [], []
    used = aside_tokens = slots = 0
    beam_width, was_cut = None, False
    for request in fitting:
        if not request.is_schedulable or request.id in inflight:
            continue
        if request.is_generating:
            if used + request.beam_width + request.draft_len > budget:
                break
            if beam_width is None:
                beam_width = request.beam_width
            if request.beam_width != beam_width:
                continue
            generation.append(request)
            used += request.beam_width + request.draft_len
        elif chunking is None:
            cost = max(1, request.prompt_len + request.draft_len - credit_of(request))
            if limit is not None and cost > limit:
                raise ValueError("a context longer than max_context_length")
            if used + cost > budget:
                break
            request.chunk = request.remaining
            contexts.append(request)
            used += cost
        else:
            cost = max(0, request.remaining - credit_of(request)) + request.draft_len
            if limit is not None and cost > limit:
                cost, was_cut = limit, True
            aside.append(request)
            aside_tokens += cost
        slots += 1
        if slots >= config["max_batch_size"]:
            break
    if chunking is not None:
        if aside_tokens > budget - used or was_cut or chunking["policy"] == "FORCE_CHUNK":
            capacity = None if config.get("max_num_tokens") is None else budget - used
            divide(chunking["policy"], chunking["unit"], capacity, limit, aside)
        else:
            for request in aside:
                request.chunk = request.remaining
        contexts = [request for request in aside if request.chunk > 0]
    generation.sort(key=lambda request: -1 if request.lora_task is None else request.lora_task)
    return contexts, generation


def micro_batch_step(config: dict, requests: list[dict], inflight: list[int]) -> dict:
    made = [make_request(record) for record in requests]
    contexts, generation = schedule_micro_batch(config, made, set(inflight))
    return {"ctx": [[request.id, request.chunk] for request in contexts],
            "gen": [request.id for request in generation],
            "draft": {str(request.id): request.draft_len for request in made}}


def chunk(config: dict, requests: list[dict], iterations: int) -> dict:
    made = [make_request(record) for record in requests]
    chunks, positions = [], []
    for _ in range(iterations):
        left = [request for request in made if request.remaining > 0]
        divide(config["policy"], config["unit"], config.get("capacity"), config.get("max_context_length"), left)
        chunks.append([request.chunk if request in left else 0 for request in made])
        for request in left:
            request.context_position += request.chunk
        positions.append([request.context_position for request in made])
    return {"chunks": chunks, "positions": positions, "final_draft_lengths": [request.draft_len for request in made]}


# Whole runs


@dataclass
class Engine:
    config: dict
    cache: Cache | None
    active: list[Request] = field(default_factory=list)
    batches: list[set[int]] = field(default_factory=list)


def build(config: dict) -> Engine:
    return Engine(copy.deepcopy(config), Cache(config["kv"]) if config.get("kv") else None)


def submit(engine: Engine, record: dict) -> None:
    insert(engine.active, make_request(record), engine.config.get("insert_order", "append"))


def has_work(engine: Engine) -> bool:
    return bool(engine.active)


def reused_blocks(engine: Engine) -> int | None:
    return None if engine.cache is None else engine.cache.reused_blocks


def start_or_go_on(cache: Cache | None, request: Request) -> None:
    """Before the first chunk of a request, take the blocks of its prompt and skip the cached tokens."""
    if cache is None or not request.is_first_chunk:
        return
    reused = cache.add(request)
    if reused == 0:
        return
    request.context_position = reused
    if reused + request.chunk >= request.prompt_len:
        request.chunk = request.remaining
        return
    size = cache.tokens_per_block
    request.chunk = (reused + request.chunk) // size * size - reused
    if request.chunk <= 0:
        raise Undefined("nothing is left of a chunk behind what was reused")


def step(engine: Engine) -> dict:
    config, cache, active = engine.config, engine.cache, list(engine.active)
    micro_batch = config.get("micro_batch")
    num_micro_batches = (micro_batch or {}).get("num_micro_batches", 1)
    inflight = set().union(*engine.batches[max(0, len(engine.batches) - num_micro_batches + 1):]
                           if num_micro_batches > 1 else [])

    fitting, paused = schedule_capacity(config, cache, active)
    for request in active:
        request.credit = 0
        if cache is not None and config["capacity_policy"] not in (None, "MAX_REQUESTS"):
            request.credit = cache.reusable_tokens(request, config["capacity_policy"] != "MAX_UTILIZATION")
    if micro_batch is not None:
        contexts, generation = schedule_micro_batch(micro_batch, fitting, inflight)
    else:
        contexts = [request for request in fitting if request.is_context]
        generation = [request for request in fitting if request.is_generating]
        for request in contexts:
            request.chunk = min(request.context_chunk or NO_LIMIT, request.remaining)
    engine.batches.append({request.id for request in contexts + generation})

    for request in paused:
        if cache is not None:
            cache.remove(cache.sequences[request.id], store=False)
        request.pause(config.get("max_input_len", NO_LIMIT))

    context_rows = []
    for request in sorted(contexts + generation, key=lambda request: request.id):
        if request.is_context:
            start_or_go_on(cache, request)
            context_rows.append([request.id, request.context_position, request.chunk])
            request.context_position += request.chunk
            if request.remaining == 0:
                if cache is not None:
                    cache.store_context(cache.sequences[request.id])
                request.state, request.generated = "GENERATION_IN_PROGRESS", 1
                if request.generation_draft_len is not None:
                    request.draft_len = request.generation_draft_len
        else:
            if cache is not None:
                cache.append(cache.sequences[request.id], 0)
            request.generated += 1

    done = [request for request in engine.active if request.generated >= request.max_new_tokens]
    for request in done:
        if cache is not None:
            sequence = cache.sequences[request.id]
            cache.remove(sequence, store=True, num_tokens=request.prompt_len + request.generated)
        engine.active.remove(request)
    return {"active": [request.id for request in active], "ctx": context_rows,
            "gen": [request.id for request in generation], "paused": [request.id for request in paused],
            "done": [request.id for request in done],
            "free_blocks": None if cache is None else cache.free_blocks}
