"""Makes random records of each type from a seed. Some have sizes like those in cases/, and some have other sizes."""

from random import Random

from . import schema_oracle

POLICIES = ["FIRST_COME_FIRST_SERVED", "EQUAL_PROGRESS", "FORCE_CHUNK"]
STATES = ["UNKNOWN", "ENCODER_INIT", "CONTEXT_INIT", "CONTEXT_INIT", "GENERATION_IN_PROGRESS",
          "GENERATION_IN_PROGRESS", "GENERATION_TO_COMPLETE", "GENERATION_COMPLETE"]
MOST_ITERATIONS = 250


def make_case(kind: str, seed: int) -> dict:
    random = Random(f"{kind} {seed}")
    return {"type": TYPE_OF.get(kind, kind), "seed": seed} | KINDS[kind](random)


def sometimes(random: Random, chance: float) -> bool:
    return random.random() < chance


def ceil_div(number: int, by: int) -> int:
    return -(-number // by)


# Whole runs


def trace_like_the_records(random: Random) -> dict:
    """Return a trace like the random ones in cases/: the pool has room for a few requests, a step for a few chunks."""
    size = random.choice([4, 8, 16])
    longest_prompt, longest_output = random.choice([(24, 16), (40, 8), (64, 16), (64, 24), (120, 40)])
    return make_trace(random, size, longest_prompt, longest_output, num_requests=random.randint(5, 40),
                      drafts=random.choice([0, 0, 0, 4]), beam_widths=random.choice([[1], [1], [1], [2]]))


def trace_of_chunks_and_priorities(random: Random) -> dict:
    """Return a trace in which requests arrive that have a higher priority than contexts between two of their chunks."""
    size = random.choice([4, 8, 16])
    longest_prompt, longest_output = random.choice([(24, 16), (40, 8), (64, 16)])
    unit, most = size * random.choice([1, 1, 2]), random.choice([2, 4, 8, 16])
    one = ceil_div(longest_prompt + longest_output, size)
    micro = {"max_batch_size": random.choice([most, max(1, most // 2)]),
             "chunking": {"policy": random.choice(POLICIES[:2]), "unit": unit},
             "max_num_tokens": unit * random.choice([1, 2, 4]) + most * 5}
    if sometimes(random, 0.3):
        micro["max_context_length"] = unit * random.randint(1, 3)
    config = {"capacity_policy": random.choice(["GUARANTEED_NO_EVICT", "GUARANTEED_NO_EVICT", "MAX_UTILIZATION"]),
              "max_num_requests": most, "insert_order": "priority", "max_input_len": 100000, "micro_batch": micro,
              "kv": {"tokens_per_block": size, "num_blocks": one + random.choice([0, 1, one // 2, one, 2 * one]),
                     "max_seq_len": longest_prompt + longest_output + random.randint(2, 8)}}
    requests = make_requests(random, random.randint(8, 40), longest_prompt, longest_output, random.choice([0, 0, 4]),
                             [1])
    for request in requests:
        request["priority"] = random.choice([0.3, 0.5, 0.8])
    return {"config": config, "requests": requests, "fixed_iterations": MOST_ITERATIONS}


def trace_of_odd_sizes(random: Random) -> dict:
    """Return a trace with odd block sizes, small pools, mixed beam widths and long drafts."""
    size = random.choice([1, 2, 3, 5, 7, 10])
    return make_trace(random, size, random.randint(1, 30), random.randint(1, 20), num_requests=random.randint(1, 14),
                      drafts=random.choice([0, 3, 20]), beam_widths=random.choice([[1], [3], [1, 2, 4]]))


def make_trace(random: Random, size: int, longest_prompt: int, longest_output: int, num_requests: int, drafts: int,
               beam_widths: list[int]) -> dict:
    policy = random.choice(["GUARANTEED_NO_EVICT", "MAX_UTILIZATION", "MAX_UTILIZATION", "STATIC_BATCH"])
    max_seq_len = longest_prompt + longest_output + random.choice([0, 0, 1, 5])
    one = ceil_div(max_seq_len, size) * max(beam_widths)
    most = random.choice([1, 2, 4, 8, 16, 32])
    config = {"capacity_policy": policy, "max_num_requests": most,
              "kv": {"tokens_per_block": size, "num_blocks": one + random.choice([0, 1, one // 2, one * 2, one * 5]),
                     "max_seq_len": max_seq_len},
              "max_input_len": random.choice([100000, 100000, 100000, longest_prompt, longest_prompt + 3])}
    if beam_widths == [1] and sometimes(random, 0.1):
        config["kv"]["window"] = random.randint(1, max_seq_len)
    if policy == "MAX_UTILIZATION" and sometimes(random, 0.3):
        config["two_step_lookahead"] = True
    if sometimes(random, 0.3):
        config["insert_order"] = "priority"
    if sometimes(random, 0.2):
        config["peft"] = {"max_device_pages": random.choice([10, 20, 30]), "pages_per_task": random.choice([5, 10, 15])}
    if sometimes(random, 0.8):
        config["micro_batch"] = micro_batch(random, most, longest_prompt + drafts, max(beam_widths) + drafts)
    requests = make_requests(random, num_requests, longest_prompt, longest_output, drafts, beam_widths)
    for request in requests:
        if "peft" in config and sometimes(random, 0.7):
            request["lora_task"] = random.randint(1, 4)
        if "insert_order" in config or sometimes(random, 0.05):
            request["priority"] = random.choice([0.3, 0.5, 0.8])
        if "micro_batch" not in config and sometimes(random, 0.4):
            request["context_chunk"] = random.randint(1, longest_prompt)
    return {"config": config, "requests": requests, "fixed_iterations": MOST_ITERATIONS}


def micro_batch(random: Random, most: int, longest: int, widest: int) -> dict:
    config = {"max_batch_size": random.choice([most, most, max(1, most // 2), 1])}
    if sometimes(random, 0.7):
        config["chunking"] = {"policy": random.choice(POLICIES), "unit": random.choice([1, 3, 4, 5, 8, 16, 32])}
        config["max_num_tokens"] = random.choice([None, longest, longest // 2 + widest, random.randint(1, 3 * longest)])
        if sometimes(random, 0.4):
            config["max_context_length"] = config["chunking"]["unit"] * random.randint(1, 4) + random.choice([0, 0, 1])
    elif sometimes(random, 0.7):
        config["max_num_tokens"] = longest + random.choice([0, 1, widest * most, random.randint(0, 3 * longest)])
    return config


def make_requests(random: Random, count: int, longest_prompt: int, longest_output: int, drafts: int,
                  beam_widths: list[int]) -> list[dict]:
    spread = random.choice([0, 0, 5, 40])
    requests = []
    for number in range(count):
        request = {"id": number, "arrival": random.randint(0, spread), "prompt_len": random.randint(1, longest_prompt),
                   "max_new_tokens": random.randint(1, longest_output)}
        if beam_widths != [1]:
            request["beam_width"] = random.choice(beam_widths)
        if drafts:
            name = "generation_draft_len" if sometimes(random, 0.2) else "draft_len"
            request[name] = random.randint(0, drafts)
        requests.append(request)
    return requests


def trace_with_reuse(random: Random) -> dict:
    """Return a trace of prompts with common prefixes, without a token budget."""
    size = random.choice([2, 4, 10])
    case = make_trace(random, size, 6 * size, 12, num_requests=random.randint(2, 12), drafts=0, beam_widths=[1])
    config = case["config"]
    config.pop("micro_batch", None)
    config["kv"].pop("window", None)
    config["kv"]["enable_block_reuse"] = True
    if sometimes(random, 0.3):
        config["kv"]["enable_partial_reuse"] = False
    for request in case["requests"]:
        request["prompt_tokens"] = shared_prompt(random, random.randint(1, 6 * size), size)
        request["prompt_len"] = len(request["prompt_tokens"])
        if "context_chunk" in request:
            request["context_chunk"] = size * random.randint(1, 3)
    return case


def shared_prompt(random: Random, length: int, size: int) -> list[int]:
    """Return a prompt whose pieces come from two sets of tokens, so that prompts often share prefixes of any length."""
    tokens = []
    while len(tokens) < length:
        start = random.choice([1000, 2000]) + 100 * (len(tokens) // size)
        tokens += range(start, start + random.randint(1, 2 * size))
    return tokens[:length]


def trace_of_micro_batches(random: Random) -> dict:
    """Return a trace for the micro-batch scheduler alone, without a KV cache and with several batches in flight."""
    config = {"capacity_policy": random.choice([None, None, "MAX_REQUESTS"])}
    if config["capacity_policy"]:
        config["max_num_requests"] = random.randint(1, 10)
    drafts = random.choice([0, 0, 5])
    beam_widths = random.choice([[1], [1], [4], [1, 2]])
    config["micro_batch"] = micro_batch(random, random.choice([1, 2, 4, 64]), 30 + drafts, max(beam_widths) + drafts)
    if sometimes(random, 0.5):
        config["micro_batch"]["num_micro_batches"] = random.randint(1, 4)
    requests = make_requests(random, random.randint(1, 14), 30, 12, drafts, beam_widths)
    return {"config": config, "requests": requests, "fixed_iterations": random.choice([10, 100])}


# Single steps


def make_states(random: Random, count: int, longest_prompt: int, with_positions: bool) -> list[dict]:
    requests = make_requests(random, count, longest_prompt, 20, random.choice([0, 0, 6]),
                             random.choice([[1], [1], [1, 2, 4]]))
    for request in requests:
        request["state"] = random.choice(STATES)
        if request["state"].startswith("GENERATION"):
            request["generated"] = random.randint(1, request["max_new_tokens"])
        elif with_positions and sometimes(random, 0.3):
            request["context_position"] = random.randint(0, request["prompt_len"] - 1)
        if sometimes(random, 0.1):
            request["lora_task"] = random.randint(0, 3)
        if request["state"] == "CONTEXT_INIT" and sometimes(random, 0.1):
            del request["state"]
    return requests


def capacity_step(random: Random) -> dict:
    policy = random.choice(["MAX_REQUESTS", "GUARANTEED_NO_EVICT", "MAX_UTILIZATION", "STATIC_BATCH"])
    config = {"capacity_policy": policy, "max_num_requests": random.randint(1, 10)}
    if policy != "MAX_REQUESTS":
        config |= {"free_blocks": random.randint(0, 40), "blocks_per_request": random.randint(0, 10)}
        if sometimes(random, 0.3):
            config["peft"] = {"max_device_pages": random.choice([10, 20]), "pages_per_task": random.choice([5, 10, 15])}
    return {"config": config, "requests": make_states(random, random.randint(0, 10), 30, True)}


def micro_batch_step(random: Random) -> dict:
    longest = random.choice([5, 20, 100])
    config = micro_batch(random, random.choice([1, 2, 4, 8, 64]), longest + 6, 10)
    requests = make_states(random, random.randint(1, 10), longest, True)
    if "max_context_length" not in config and sometimes(random, 0.5):
        give_credits(random, requests, config.get("chunking", {}).get("policy"))
    inflight = [request["id"] for request in requests if sometimes(random, 0.1)]
    return {"config": config, "requests": requests, "inflight": inflight}


def give_credits(random: Random, requests: list[dict], policy: str | None) -> None:
    """Set the number of reusable tokens of some context requests, except under the policy FORCE_CHUNK."""
    for request in requests:
        is_context = request.get("state", "CONTEXT_INIT") == "CONTEXT_INIT"
        if is_context and policy != "FORCE_CHUNK" and sometimes(random, 0.4):
            request["estimated_reusable_tokens"] = random.randint(0, request["prompt_len"] + 5)


def chunking(random: Random) -> dict:
    config = {"policy": random.choice(POLICIES), "unit": random.choice([1, 2, 3, 5, 8, 10, 16, 64])}
    if sometimes(random, 0.7):
        config["capacity"] = random.choice([0, random.randint(1, 20), random.randint(1, 200)])
    if sometimes(random, 0.5):
        config["max_context_length"] = random.randint(1, 80)
    if config["policy"] == "FORCE_CHUNK" and "max_context_length" in config:
        config["max_context_length"] += config["unit"]
    requests = [{"id": number, "arrival": 0, "prompt_len": random.choice([random.randint(1, 20),
                                                                          random.randint(1, 150)]),
                 "max_new_tokens": 1} for number in range(random.randint(1, 5))]
    for request in requests:
        if sometimes(random, 0.4):
            request["draft_len"] = random.randint(0, 20)
    if "max_context_length" not in config and sometimes(random, 0.2):
        give_credits(random, requests, config["policy"])
    return {"config": config, "requests": requests, "iterations": random.randint(1, 6)}


def request_order(random: Random) -> dict:
    requests = make_requests(random, random.randint(0, 12), 10, 10, 0, [1])
    for request in requests:
        if sometimes(random, 0.7):
            request["priority"] = random.choice([0.0, 0.3, 0.5, 0.6, 1.0])
    return {"requests": requests}


def request_pause(random: Random) -> dict:
    record = {"id": 0, "prompt_len": random.randint(1, 20), "max_new_tokens": 60,
              "beam_width": random.choice([1, 1, 2])}
    limit = random.randint(20, 40)
    return {"request": record, "steps": [{"generated": random.randint(0, 8), "pause_max_input_len": limit}
                                         for _ in range(random.randint(1, 3))]}


def retention_map(random: Random) -> dict:
    seq_len, ranges, start = random.randint(1, 100), [], 0
    for _ in range(random.randint(0, 4)):
        start += random.choice([0, random.randint(0, 20), random.randint(-3, 3)])
        end = start + random.choice([random.randint(1, 40), random.randint(-1, 2)])
        ranges.append([max(start, 0), end, random.randint(0, 100)])
        start = end
    if ranges and sometimes(random, 0.3):
        ranges[-1][1] = None
    if sometimes(random, 0.1):
        random.shuffle(ranges)
    case = {"ranges": [each + [random.randint(1, 9)] if sometimes(random, 0.1) else each for each in ranges]}
    if sometimes(random, 0.9):
        case |= {"tokens_per_block": random.choice([1, 3, 4, 16, 64]), "seq_len": seq_len}
    return case


def eviction_ops(random: Random) -> dict:
    num_blocks, now = random.randint(2, 10), 0
    ops, free, named = [], num_blocks, {}
    for number in range(random.randint(5, 50)):
        what = random.choice(["count", "peek", "claim", "claim", "claim", "release", "release", "advance_time",
                              "refresh", "claim_next"])
        if what in ("peek", "claim") and free:
            name = f"b{number}"
            ops.append({"op": "peek", "as": name})
            if what == "claim":
                claim = {"op": "claim", "block": name}
                if sometimes(random, 0.6):
                    claim["priority"] = random.choice([0, 5, 30, 35, 36, 80, 100])
                    if sometimes(random, 0.5):
                        claim["duration"] = random.randint(0, 10)
                ops.append(claim)
                named[name] = True
                free -= 1
        elif what == "release" and named:
            name = random.choice(sorted(named))
            del named[name]
            ops.append({"op": "release", "block": name, "front": sometimes(random, 0.2)})
            free += 1
        elif what == "claim_next" and free and sometimes(random, 0.3):
            count = random.randint(1, free)
            ops.append({"op": "claim_next", "count": count})
            free -= count
        elif what == "advance_time":
            passed = random.randint(0, 8)
            now += passed
            ops.append(random.choice([{"op": what, "ms": passed}, {"op": "set_time", "ms": now}]))
        elif what in ("count", "refresh"):
            ops.append({"op": what})
    return {"config": {"num_blocks": num_blocks}, "ops": ops}


def prefix_tree_ops(random: Random) -> dict:
    size, ops, names = random.choice([1, 2, 3]), [], 0
    for _ in range(random.randint(3, 25)):
        tokens = [random.randint(0, 1) for _ in range(random.randint(1, 8))]
        domain = {"lora_task": random.choice([1, 2])} if sometimes(random, 0.1) else {}
        if sometimes(random, 0.1):
            domain["salt"] = random.choice([1, 2])
        if sometimes(random, 0.5):
            names += 1
            ops.append({"op": "insert", "tokens": tokens, "as": f"n{names}"} | domain)
        else:
            ops.append({"op": "match", "tokens": tokens} | domain)
    if names and sometimes(random, 0.7):
        ops.append({"op": "remove_subtree", "node": f"n{random.randint(1, names)}"})
        ops.append({"op": "match", "tokens": [0, 1, 1]})
    return {"config": {"tokens_per_block": size, "enable_partial_reuse": sometimes(random, 0.5)}, "ops": ops}


# The block tables


def kv_fill(random: Random) -> dict:
    size, max_seq_len = random.choice([1, 4, 16, 64]), random.randint(10, 90)
    config = {"tokens_per_block": size, "num_blocks": random.randint(max_seq_len // size + 2, 120),
              "max_seq_len": max_seq_len}
    prompt_len = random.randint(1, max_seq_len - 1)
    if sometimes(random, 0.5):
        config["window"] = random.randint(1, max_seq_len)
        config["temporary_attention_window"] = max(0, max_seq_len - config["window"] - random.choice([0, 1]))
    return {"config": config, "prompt_len": prompt_len, "tokens_to_add": random.randint(1, max_seq_len - prompt_len),
            "mode": random.choice(["one_by_one", "parallel"])}


class OpsMaker:
    """Makes the operations of a `kv_ops` record. It runs the model, and leaves out operations that have no result."""

    def __init__(self, random: Random, reuse: bool, window: bool, beams: bool) -> None:
        self.random = random
        self.size = random.choice([1, 2, 3, 4, 4, 8])
        self.longest = self.size * 6
        self.config = {"tokens_per_block": self.size, "num_blocks": random.randint(4, 30),
                       "max_seq_len": self.longest + 30}
        if reuse:
            self.config["enable_block_reuse"] = True
            if sometimes(random, 0.2):
                self.config["enable_partial_reuse"] = False
        if window:
            self.config["window"] = random.randint(1, self.longest + 10)
            if not reuse and sometimes(random, 0.3):
                self.config["temporary_attention_window"] = random.randint(0, self.longest)
        self.reuse, self.window, self.beams = reuse, window, beams
        self.ops: list[dict] = []
        self.tables = schema_oracle.Tables(self.config)
        self.records: dict[int, dict] = {}  # id -> record of each live sequence, with the tokens added
        self.next_id = 0
        self.prompts: list[list[int]] = []

    def make(self, count: int) -> dict:
        for _ in range(count):
            self.random.choice([self.add, self.add, self.append, self.append, self.remove, self.store, self.ask,
                                self.rewind, self.time, self.probe])()
        return {"config": self.config, "ops": self.ops}

    def do(self, op: dict) -> dict:
        """Add an operation and return the model's result. An operation that the rules do not define is not added."""
        try:
            result = self.tables.run(op)
        except schema_oracle.Undefined:
            return {"error": "undefined"}
        self.ops.append(op)
        return result

    def prompt(self) -> list[int]:
        if self.prompts and sometimes(self.random, 0.6):  # a known prompt, cut or changed somewhere
            tokens = list(self.random.choice(self.prompts))
            place = self.random.randint(1, len(tokens))
            if sometimes(self.random, 0.5):
                tokens = tokens[:place]
            else:
                tokens[place - 1:] = [self.random.randint(0, 2) for _ in tokens[place - 1:]]
        else:
            tokens = [self.random.randint(0, 2) for _ in range(self.random.randint(1, self.longest))]
        self.prompts.append(tokens)
        return tokens

    def describe(self) -> dict:
        random = self.random
        if not self.reuse:
            record = {"prompt_len": random.randint(1, self.longest)}
            if self.beams and sometimes(random, 0.5):
                record["beam_width"] = random.choice([1, 2, 3, 4])
            return record
        record = {"tokens": self.prompt()}
        if self.beams and sometimes(random, 0.3):
            record["beam_width"] = random.choice([2, 3])
        if sometimes(random, 0.15):
            record["lora_task"] = random.choice([1, 2])
        if sometimes(random, 0.15):
            record["cache_salt"] = random.choice([1, 2])
        if sometimes(random, 0.15):
            record["token_extra_ids"] = [random.randint(0, 1) for _ in record["tokens"]]
        if sometimes(random, 0.4):
            record["retention"] = self.retention(len(record["tokens"]))
        return record

    def retention(self, length: int) -> dict:
        random, ranges, start = self.random, [], 0
        while start < length and len(ranges) < 3:
            start += random.choice([0, 0, self.size, random.randint(0, 5)])
            end = random.choice([None, start + self.size * random.randint(1, 3), start + random.randint(1, 9)])
            each = [start, end, random.choice([0, 10, 34, 35, 36, 60, 100])]
            ranges.append(each + [random.randint(1, 20)] if sometimes(random, 0.3) else each)
            if end is None:
                break
            start = end
        retention = {"ranges": ranges}
        if sometimes(random, 0.6):
            retention["decode_priority"] = random.choice([0, 20, 35, 80])
        return retention

    def add(self) -> None:
        if self.records and sometimes(self.random, 0.03):
            self.do({"op": "add_sequence", "req": self.random.choice(sorted(self.records)), "prompt_len": 3})
            return
        record = self.describe()
        result = self.do({"op": "add_sequence", "req": self.next_id} | record)
        if "error" not in result:
            self.records[self.next_id] = record | {"added": 0, "shared": result["reused_tokens"] > 0}
        self.next_id += 1

    def live(self) -> int | None:
        return self.random.choice(sorted(self.records)) if self.records else None

    def append(self) -> None:
        req = self.live()
        if req is None:
            return
        count = self.random.choice([1, 1, 2, self.size, self.random.randint(1, 12)])
        count = min(count, 30 - self.records[req]["added"])
        if count <= 0:
            return
        self.records[req]["added"] += count
        op = {"op": "append_tokens", "req": req, "count": count}
        if self.reuse or sometimes(self.random, 0.3):
            op = {"op": "append_tokens", "req": req, "tokens": [self.random.randint(0, 2) for _ in range(count)]}
        if "error" in self.do(op):
            self.do({"op": "remove_sequence", "req": req, "store_for_reuse": False})
            del self.records[req]

    def rewind(self) -> None:
        req = self.live()
        if req is None or self.window or not self.records[req]["added"]:
            return
        count = self.random.randint(1, self.records[req]["added"])
        self.records[req]["added"] -= count
        self.do({"op": "rewind", "req": req, "count": count})

    def length(self, req: int) -> int:
        record = self.records[req]
        return record.get("prompt_len") or len(record["tokens"])

    def store(self) -> None:
        req = self.live()
        if req is None or not self.reuse:
            return
        op = {"op": "store_context", "req": req}
        if sometimes(self.random, 0.3):
            op["materialized_tokens"] = self.random.randint(0, self.length(req))
        self.records[req]["shared"] = True
        self.do(op)

    def remove(self) -> None:
        req = self.live()
        if req is None:
            return
        op = {"op": "remove_sequence", "req": req, "store_for_reuse": self.reuse and sometimes(self.random, 0.8)}
        record = self.records[req]
        if op["store_for_reuse"] and not record["added"] and not record["shared"] and sometimes(self.random, 0.2):
            op["materialized_tokens"] = self.random.randint(1, self.length(req))
        del self.records[req]
        self.do(op)

    def ask(self) -> None:
        random, req = self.random, self.live()
        request = {"id": 10**6, "max_new_tokens": random.randint(1, 30), "draft_len": random.choice([0, 0, 1, 5])}
        if req is None or sometimes(random, 0.5):
            described = self.describe()
            described.pop("retention", None)
            if "tokens" in described:
                described["prompt_tokens"] = described.pop("tokens")
                described["prompt_len"] = len(described["prompt_tokens"])
            request |= described
            if sometimes(random, 0.1) and request["prompt_len"] > 1:
                request["context_position"] = random.randint(1, request["prompt_len"] - 1)
        else:
            record, added = self.records[req], self.records[req]["added"]
            generated = added + random.choice([0, 1])
            request |= {"id": req, "prompt_len": self.length(req), "beam_width": record.get("beam_width", 1),
                        "state": "GENERATION_IN_PROGRESS", "generated": generated,
                        "max_new_tokens": max(1, generated) + random.randint(0, 30)}
            if "tokens" in record:
                request["prompt_tokens"] = record["tokens"]
        if sometimes(random, 0.5):
            self.do({"op": "needed_one_step", "request": request,
                             "two_step_lookahead": sometimes(random, 0.4)})
        else:
            self.do({"op": "remaining_to_completion", "request": request})

    def probe(self) -> None:
        if self.reuse:
            tokens = self.prompt()
            self.do({"op": "probe_prefix", "request": {"id": 10**6, "prompt_len": len(tokens),
                                                               "prompt_tokens": tokens, "max_new_tokens": 1}})

    def time(self) -> None:
        if self.reuse:
            self.do({"op": "advance_time", "ms": self.random.randint(0, 15)})
            if sometimes(self.random, 0.7):
                self.do({"op": "refresh"})


def kv_plain(random: Random) -> dict:
    return OpsMaker(random, reuse=False, window=False, beams=True).make(random.randint(5, 30))


def kv_window(random: Random) -> dict:
    return OpsMaker(random, reuse=False, window=True, beams=False).make(random.randint(5, 30))


def kv_reuse(random: Random) -> dict:
    return OpsMaker(random, reuse=True, window=False, beams=sometimes(random, 0.2)).make(random.randint(5, 60))


KINDS = {
    "trace_like_the_records": trace_like_the_records,
    "trace_of_chunks_and_priorities": trace_of_chunks_and_priorities,
    "trace_of_odd_sizes": trace_of_odd_sizes,
    "trace_with_reuse": trace_with_reuse,
    "trace_of_micro_batches": trace_of_micro_batches,
    "capacity_step": capacity_step,
    "micro_batch_step": micro_batch_step,
    "chunking": chunking,
    "request_order": request_order,
    "request_pause": request_pause,
    "retention_map": retention_map,
    "eviction_ops": eviction_ops,
    "prefix_tree_ops": prefix_tree_ops,
    "kv_fill": kv_fill,
    "kv_plain": kv_plain,
    "kv_window": kv_window,
    "kv_reuse": kv_reuse,
}
TYPE_OF = {kind: "scheduler_trace" for kind in KINDS if kind.startswith("trace")} | {
    "kv_plain": "kv_ops", "kv_window": "kv_ops", "kv_reuse": "kv_ops"}
