"""Runs one case with the model in schema_oracle.py and with the engine in adapter.py, and returns the differences."""

import copy

from . import schema_oracle


class NotCompared(Exception):
    """Raised for a case whose result the rules do not define."""


def differences(adapter, case: dict) -> list[str]:
    """Return the first differences between the results of the model and of `adapter`, as text.

    Raises NotCompared if the rules do not define the result.
    """
    if case["type"] == "scheduler_trace":
        return compare_traces(adapter, case)
    try:
        expected = call(schema_oracle, case)
    except schema_oracle.Undefined as reason:
        raise NotCompared(str(reason)) from None
    except ValueError as reason:
        raise NotCompared(str(reason)) from None
    found = call(adapter, case)
    if case["type"] == "kv_ops" and not case["config"].get("enable_block_reuse"):
        for result in expected["results"]:  # without reuse, block ids do not matter
            result.pop("block_ids", None)
    if case["type"] in ("kv_ops", "eviction_ops", "prefix_tree_ops"):
        return compare_operations(expected["results"], found["results"])
    if case["type"] == "micro_batch_step":
        return compare_micro_batches(case, expected, found)
    return [] if expected == found else [f"{found} came, {expected} was expected"]


def call(module, case: dict) -> dict:
    case = copy.deepcopy(case)
    kind = case["type"]
    if kind == "micro_batch_step":
        return module.micro_batch_step(case["config"], case["requests"], case["inflight"])
    if kind == "capacity_step":
        return module.capacity_step(case["config"], case["requests"])
    if kind == "chunking":
        return module.chunk(case["config"], case["requests"], case["iterations"])
    if kind == "request_order":
        return module.request_order(case["requests"])
    if kind == "request_pause":
        return module.request_pause(case["request"], case["steps"])
    if kind == "retention_map":
        return module.retention_map(case["ranges"], case.get("tokens_per_block"), case.get("seq_len"))
    if kind == "kv_fill":
        return module.kv_fill(case["config"], case["prompt_len"], case["tokens_to_add"], case["mode"])
    return getattr(module, kind)(case["config"], case["ops"])


def compare_micro_batches(case: dict, expected: dict, found: dict) -> list[str]:
    """Return the differences of two plans of the micro-batch scheduler.

    With EQUAL_PROGRESS, the engine leaves out a first chunk of reused tokens only. Such chunks are removed from
    `expected`.
    """
    of = {request["id"]: request for request in case["requests"]}
    if case["config"].get("chunking", {}).get("policy") == "EQUAL_PROGRESS":
        expected["ctx"] = [[name, size] for name, size in expected["ctx"]
                           if of[name].get("context_position", 0) or size == of[name]["prompt_len"]
                           or size > of[name].get("estimated_reusable_tokens", 0)]
    scheduled = {str(request_id) for request_id, _ in expected["ctx"]}
    bad = [f"{key}: {found[key]} came, {expected[key]} was expected" for key in ("ctx", "gen")
           if sorted(found[key]) != sorted(expected[key])]
    return bad + [f"drafts of {name}: {found['draft'][name]} came, {kept} was expected"
                  for name, kept in expected["draft"].items() if name in scheduled and found["draft"][name] != kept]


def compare_operations(expected: list[dict], found: list[dict]) -> list[str]:
    bad, ours, theirs = [], {}, {}
    for number, (want, got) in enumerate(zip(expected, found, strict=True)):
        for key, value in want.items():
            if key not in ("block_ids", "block"):
                if got.get(key) != value:
                    bad.append(f"operation {number}: {key} {got.get(key)} came, {value} was expected")
                continue
            pairs = zip(value, got[key], strict=True) if isinstance(value, list) else [(value, got[key])]
            for mine, other in pairs:
                if ours.setdefault(mine, other) != other or theirs.setdefault(other, mine) != mine:
                    bad.append(f"operation {number}: block {other} came where {ours[mine]} was expected")
                    break
        if bad:
            break
    return bad


def compare_traces(adapter, case: dict) -> list[str]:
    """Return the differences of the first iteration in which model and engine differ; none if no iteration does."""
    model, product = schema_oracle.build(case["config"]), adapter.build(copy.deepcopy(case["config"]))
    to_come, known = sorted(case["requests"], key=lambda request: request["arrival"]), False
    for iteration in range(case["fixed_iterations"]):
        while to_come and to_come[0]["arrival"] <= iteration:
            schema_oracle.submit(model, dict(to_come[0]))
            adapter.submit(product, dict(to_come.pop(0)))
        if not to_come and not schema_oracle.has_work(model):
            break
        known = known or estimates_decide(model)
        waits = first_in_line_waits(model)
        try:
            expected = schema_oracle.step(model)
        except (schema_oracle.OutOfBlocks, schema_oracle.Undefined, ValueError) as error:
            raise NotCompared(repr(error)) from None
        found = adapter.step(product)
        bad = [f"iteration {iteration}: {key} {found[key]} came, {value} was expected"
               for key, value in expected.items() if in_order(key, found[key]) != in_order(key, value)]
        if bad and waits:
            raise NotCompared("the first in line waits for another's prefix")
        if bad and longer_than_a_step(model):
            raise NotCompared("a pause made a context longer than a step")
        if bad and known:
            raise NotCompared("blocks are short, and estimates decide")
        if bad and case["config"].get("kv") and not any(expected[key] for key in ("ctx", "gen", "paused", "done")):
            raise NotCompared("nobody runs any more")
        if bad:
            return bad
    if schema_oracle.has_work(model) != adapter.has_work(product):
        return ["one of the two has work left, the other has not"]
    wanted, reused = schema_oracle.reused_blocks(model), adapter.reused_blocks(product)
    return [] if wanted == reused else [f"{reused} blocks were reused, {wanted} were expected"]


def estimates_decide(model) -> bool:
    """Whether the pool is too small for all requests, and the rules may plan with wrong numbers of blocks.

    The rules plan with estimated numbers of blocks, and the engine plans with the blocks that a claim takes. The
    estimates can be wrong for prompts that share blocks, for windows, and for drafts of several beams.
    """
    cache = model.cache
    if cache is None:
        return False
    inexact = cache.reuse or cache.window < cache.max_seq_len
    if not inexact and not any(request.draft_len and request.beam_width > 1 for request in model.active):
        return False
    needs = [schema_oracle.ceil_div(request.prompt_len + request.max_new_tokens + request.draft_len + 1,
                                    cache.tokens_per_block) * request.beam_width for request in model.active]
    return sum(needs) > cache.num_blocks


def longer_than_a_step(model) -> bool:
    """Whether a context has more tokens than the token budget of a step, while chunking is off.

    By the rules, such a context never fits into a step. The engine computes it in chunks of whole blocks.
    """
    micro_batch = model.config.get("micro_batch") or {}
    budget = micro_batch.get("max_num_tokens")
    return budget is not None and micro_batch.get("chunking") is None and any(
        request.prompt_len + request.draft_len > budget for request in model.active)


def first_in_line_waits(model) -> bool:
    """Whether, by the rules, the first request waits for a block that a later context between two chunks will compute.

    This can happen under MAX_UTILIZATION with priorities. In the engine, the first request does not wait.
    """
    if model.cache is None or model.config["capacity_policy"] != "MAX_UTILIZATION" or not model.active:
        return False
    return schema_oracle.Duplicates(model.cache, model.cache.reuse, model.active).delay(model.active[0])


def in_order(key: str, value):
    return value if key in ("active", "free_blocks") else sorted(value)


def shrink(adapter, case: dict, tries: int = 3000) -> dict:
    """Return a smaller case that still differs, with fewer requests, operations or options, or smaller numbers."""

    def differs(candidate: dict) -> bool:
        try:
            return bool(differences(adapter, candidate))
        except NotCompared:
            return False
        except Exception as error:
            return type(error) is failure

    failure = None
    try:
        differences(adapter, case)
    except NotCompared:
        return case
    except Exception as error:
        failure = type(error)
    changed = True
    while changed and tries > 0:
        changed = False
        for candidate in smaller(case):
            tries -= 1
            if tries <= 0:
                break
            if legal(candidate) and differs(candidate):
                case, changed = candidate, True
                break
    return case


def legal(case: dict) -> bool:
    """Whether the case refers to existing entries only, so that the model does not fail with a lookup error."""
    try:
        call(schema_oracle, case) if case["type"] != "scheduler_trace" else None
    except (KeyError, IndexError, ZeroDivisionError, AttributeError):
        return False
    except Exception:
        return True
    return True


def smaller(case: dict):
    for name in ("ops", "requests", "steps", "ranges", "inflight"):
        for place in reversed(range(len(case.get(name, ())))):
            yield case | {name: case[name][:place] + case[name][place + 1:]}
    for place, each in enumerate(case.get("requests", ())):
        for key in each:
            if key not in ("id", "prompt_len", "max_new_tokens", "arrival"):
                less = {name: value for name, value in each.items() if name != key}
                yield case | {"requests": case["requests"][:place] + [less] + case["requests"][place + 1:]}
            elif key != "id" and each[key] > (1 if key != "arrival" else 0) and "prompt_tokens" not in each:
                for value in (each[key] // 2, each[key] - 1):
                    less = each | {key: max(value, 0 if key == "arrival" else 1)}
                    yield case | {"requests": case["requests"][:place] + [less] + case["requests"][place + 1:]}
    for place, each in enumerate(case.get("ops", ())):
        for key in each:
            if key in ("retention", "lora_task", "cache_salt", "token_extra_ids", "beam_width", "priority", "duration"):
                less = {name: value for name, value in each.items() if name != key}
                yield case | {"ops": case["ops"][:place] + [less] + case["ops"][place + 1:]}
    config = case.get("config", {})
    for key in config:
        if key not in ("tokens_per_block", "num_blocks", "max_seq_len", "capacity_policy", "kv", "policy", "unit",
                       "max_batch_size", "max_num_requests"):
            yield case | {"config": {name: value for name, value in config.items() if name != key}}
