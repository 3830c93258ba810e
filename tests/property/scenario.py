"""Random scenarios. A seed decides everything before the run starts, so that a scenario can be shrunk."""

import random
from dataclasses import dataclass, field, replace

LONGEST = 64                                                    # tokens of a sequence


@dataclass(frozen=True)
class RequestPlan:
    """One request, with its arrival and its end.

    arrival      iteration in which the request arrives
    fails_at     which of the request's steps yields garbage; None if no step does
    stops_at     iteration in which the request is stopped, if it is still active
    ends_at      number of generated tokens after which the request ends
    retention    ((start, end, priority, milliseconds) ..., decode priority, decode milliseconds)
    """

    arrival: int
    prompt: tuple[int, ...]
    max_new_tokens: int
    beam_width: int = 1
    draft_len: int = 0
    priority: float = 0.5
    lora_task_id: int | None = None
    cache_salt: str | None = None
    token_extra_ids: tuple[int, ...] | None = None
    retention: tuple | None = None
    fails_at: int | None = None
    stops_at: int | None = None
    ends_at: int | None = None


@dataclass(frozen=True)
class Options:
    """Options of the engine of a scenario.

    The spare_* fields are added to the smallest limits with which the largest request can run.
    """

    policy: str = "MAX_UTILIZATION"
    tokens_per_block: int = 4
    spare_blocks: int = 20
    window: int | None = None
    sinks: int = 0
    max_beam_width: int = 1
    reuse: bool = False
    partial_reuse: bool = True
    host_blocks: int = 0
    digest_bits: int = 256
    chunking: str | None = None
    max_context_length: int | None = None
    max_batch_size: int = 8
    spare_tokens: int = 200
    max_num_requests: int = 1000
    depth: int = 1
    lookahead: bool = False
    spare_pages: int | None = None
    seconds_per_iteration: float = 1.0
    unread_steps: int = 0


@dataclass(frozen=True)
class Scenario:
    options: Options
    requests: tuple[RequestPlan, ...] = field(default=())


def random_scenario(seed: int) -> Scenario:
    """Return a scenario with a small pool and few distinct tokens, so that requests compete for blocks.

    In half of the scenarios, all prompts have a common prefix and one domain, so that many blocks are shared.
    """
    draw = random.Random(seed)
    options = _random_options(draw)
    alike = draw.random() < 0.5
    texts = [tuple(draw.randrange(2) for _ in range(30)) for _ in range(1 if alike else 2)]
    requests = []
    for _ in range(draw.randint(2, 10)):
        plan = _random_request(draw, options, texts, alike)
        if alike:
            plan = replace(plan, cache_salt=None, token_extra_ids=None,
                           lora_task_id=None if options.spare_pages is None else plan.lora_task_id)
        requests.append(plan)
    return Scenario(options, tuple(requests))


def _random_options(draw: random.Random) -> Options:
    policy = draw.choice(["MAX_UTILIZATION", "MAX_UTILIZATION", "GUARANTEED_NO_EVICT", "GUARANTEED_NO_EVICT",
                          "STATIC_BATCH"])
    unit = draw.choice([1, 2, 2, 3, 4, 4, 8])
    window = draw.choice([None, None, draw.randint(1, 9), draw.randint(1, 20)])
    chunking = draw.choice([None, "FIRST_COME_FIRST_SERVED", "EQUAL_PROGRESS", "FORCE_CHUNK"])
    return Options(
        policy=policy,
        tokens_per_block=unit,
        spare_blocks=draw.choice([0, 0, 1, 2, 3, 5, 8, 12]),
        window=window,
        sinks=draw.choice([0, 0, 0, draw.randint(1, 6)]) if window else 0,
        max_beam_width=draw.choice([1, 1, 2, 3]),
        reuse=draw.random() < 0.8,
        partial_reuse=draw.random() < 0.6,
        host_blocks=draw.choice([0, 0, 1, 3, 10]),
        digest_bits=draw.choice([4, 8, 256]),
        chunking=chunking,
        max_context_length=draw.choice([None, None, unit * draw.randint(1, 4)]) if chunking else None,
        max_batch_size=draw.choice([1, 2, 4, 6, 8]),
        spare_tokens=draw.choice([0, 1, 3, 10, 100]),
        max_num_requests=draw.choice([1000, 1000, 1, 2, 4]),
        depth=draw.choice([1, 2]) if policy != "STATIC_BATCH" else 1,
        lookahead=draw.random() < 0.2,
        spare_pages=draw.choice([None, None, 0, 0, 1]),
        seconds_per_iteration=draw.choice([0.0, 1.0, 5.0]),
        unread_steps=draw.choice([0, 0, 1, 2]),
    )


def _random_request(draw: random.Random, options: Options, texts: list[tuple[int, ...]],
                    alike: bool) -> RequestPlan:
    shared = draw.choice(texts)[:draw.randint(8, 24) if alike else draw.choice([0, draw.randint(0, 24)])]
    prompt = shared + tuple(draw.randrange(3) for _ in range(draw.choice([0, 1, draw.randint(0, 9)])))
    prompt = prompt or (0,)
    beam_width = draw.randint(1, options.max_beam_width)
    extra_ids = None
    if draw.random() < 0.15:
        extra_ids = tuple(draw.choice([0, 0, 7]) for _ in prompt)
    return RequestPlan(
        arrival=draw.choice([0, draw.randint(0, 6), draw.randint(0, 12), draw.randint(0, 30)]),
        prompt=prompt,
        max_new_tokens=draw.randint(1, 14),
        beam_width=beam_width,
        draft_len=draw.choice([0, 0, draw.randint(1, 4)]) if beam_width == 1 else 0,
        priority=draw.choice([0.5, 0.5, 0.2, 0.9]),
        lora_task_id=draw.choice([None, 0, 1, 2] if options.spare_pages is not None else [None, None, None, 0, 1]),
        cache_salt=draw.choice([None, None, None, "a"]),
        token_extra_ids=extra_ids,
        retention=_random_retention(draw, len(prompt)) if draw.random() < 0.3 else None,
        fails_at=draw.choice([None] * 11 + [draw.randint(1, 6)]),
        stops_at=draw.choice([None] * 9 + [draw.randint(0, 25)]),
        ends_at=draw.choice([None] * 5 + [draw.randint(1, 8)]),
    )


def _random_retention(draw: random.Random, prompt_len: int) -> tuple:
    middle = draw.randint(1, prompt_len)

    def lasting() -> tuple[int, int | None]:
        return draw.choice([0, 10, 30, 35, 80, 100]), draw.choice([None, 0, 3000, 20000])

    ranges = [(0, middle, *lasting())]
    if draw.random() < 0.5:
        ranges.append((middle, None, *lasting()))
    return tuple(ranges), *lasting()
