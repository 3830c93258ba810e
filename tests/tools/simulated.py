"""Small traffic, settings and cost models for tests of `batch-manager simulate`."""

from dataclasses import replace

import numpy as np

from batch_manager import SchedulerPolicy
from batch_manager.tools.datasets.records import Record
from batch_manager.tools.simulate.cost_model import CostModel
from batch_manager.tools.simulate.engine_settings import EngineSettings
from batch_manager.tools.simulate.fleet import simulate
from batch_manager.tools.simulate.traffic import PromptMaker, Traffic

COST = CostModel(
    {"constant": 4e-3, "generation_requests": 2e-4, "generation_requests_up_to_4": 1e-3, "cached_tokens": 1e-6},
    {"constant": 6e-3, "context_tokens": 5e-5, "context_attention": 1e-8, "generation_requests": 3e-4,
     "cached_tokens": 1e-6},
    {"constant": 2e-4, "generation_requests": 1e-5},
    generation_spread=(0.9, 0.95, 1.0, 1.05, 1.1), mixed_spread=(0.8, 1.0, 1.2))


# Some amounts of many steps are beyond these.
BOUNDED_COST = replace(COST, most={"context_requests": 1, "context_tokens": 100, "context_attention": 9000,
                                   "generation_requests": 4, "cached_tokens": 700, "shared_tokens": 100})


def random_settings(random):
    size = int(random.choice([8, 16, 32]))
    return EngineSettings(
        num_blocks=int(random.integers(400 // size, 2000 // size)), max_seq_len=int(random.choice([400, 400, 250])),
        tokens_per_block=size,
        policy=SchedulerPolicy(random.choice([SchedulerPolicy.GUARANTEED_NO_EVICT, SchedulerPolicy.MAX_UTILIZATION])),
        max_batch_size=int(random.integers(1, 12)), max_num_tokens=int(random.integers(64, 300)),
        max_num_sequences=[None, 3, 20][random.integers(3)], enable_block_reuse=bool(random.integers(2)),
        enable_chunked_context=random.random() < 0.8, enable_trt_overlap=random.random() < 0.15)


def random_traffic(random, count, sessions=0):
    """Return traffic, of `sessions` sessions if it is above 0."""
    records, now = [], 0.0
    for number in range(count):
        now += float(random.exponential(random.choice([0.001, 0.05, 0.3])))
        prompt = None
        length = int(random.integers(1, 300))
        if random.random() < 0.5:            # half of the prompts begin with copies of one of three tokens
            prompt = [int(random.integers(3))] * int(random.integers(1, length + 1))
            prompt += random.integers(3, 1000, length - len(prompt)).tolist()
        output = int(random.integers(1, 400 - length))
        records.append(Record(number, number, now, length, output, (), prompt))
        if sessions:        # the longest session reaches the longest sequence, and fails
            prompt, output = random.integers(3, 1000, 1 + length % 40).tolist(), 1 + output % 40
            records[-1] = Record(number, number, now, len(prompt), output, (), prompt, int(random.integers(sessions)),
                                 float(random.choice([0.0, 0.0, 0.2])))
    return Traffic.of_records(records)


def turns_of(turns):
    """Return the traffic of (session or None, arrival in seconds, prompt tokens, output tokens, think_s)."""
    return Traffic.of_records([
        Record(number, number, arrival_s, size, output, (), [number + 10] * size, session, think_s)
        for number, (session, arrival_s, size, output, think_s) in enumerate(turns)])


def random_run(seed, count, leaps, sessions=0, is_asynchronous=False):
    """Simulate random traffic with random settings, which depend on the seed."""
    random = np.random.default_rng(seed)
    traffic, settings = random_traffic(random, count, sessions), random_settings(random)
    cost = replace(BOUNDED_COST, is_asynchronous=is_asynchronous)
    return simulate(traffic, settings, cost, leaps=leaps, seed=seed, num_replicas=int(random.integers(1, 4)),
                    at_most=[None, 3][random.integers(2)] if sessions else None,
                    concurrency=[None, None, 5][random.integers(3)],
                    routing=["round-robin", "least-loaded", "longest-prefix"][random.integers(3)])


def records(run):
    """Return all that a simulation records, by name. Arrays are bytes, so that records are equal to the last bit."""
    book = run.log_book
    found = {name: getattr(book, name).tobytes() for name in ("first_s", "last_s", "tokens", "replica")}
    found |= {"gaps": [column.tobytes() for column in book.gaps()], "errors": book.errors, "wall_s": run.wall_s,
              "arrival_s": np.array(run.arrival_s).tobytes()}
    for replica in run.replicas:
        backend = replica.backend
        found[f"replica {replica.number}"] = (
            replica.iterations, replica.reused_tokens, replica.recomputed_tokens, replica.clock.now, backend.steps,
            backend.busy_s, backend.beyond, backend.steps_beyond)
    return found


def lengths(arrival_s, input_tokens, output_tokens):
    """Return traffic whose prompts share no prefix."""
    inputs = np.array(input_tokens)
    return Traffic(np.array(arrival_s, float), inputs, np.array(output_tokens), PromptMaker(inputs, None))
