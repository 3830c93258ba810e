"""A swarm: one random configuration per seed, with a random subset of the engine's features.

Each feature is therefore tested with and without other features. A test with every feature on hides faults that only
show when a feature is off (Groce et al., "Swarm Testing", 2012).
"""

from collections.abc import Collection
from dataclasses import dataclass, replace
from random import Random

from batch_manager.config import KvTransferConfig
from batch_manager.names import ContextChunkingPolicy, SchedulerPolicy, TrtGptModelType
from batch_manager.testing.scripted_backend import ADAPTER_MODULES

from .faults import ENDINGS, MENU, Fault, Place, menu_of

TERMINATE_ID = 2**64 - 1
TEN_YEARS_S = 3e8
FLOAT32 = 4


@dataclass(frozen=True, slots=True)
class Traffic:
    """The requests that the get callback returns. The floats are probabilities.

    arrival          probability that a call of get returns requests
    burst            largest number of requests that a call of get returns
    prompt, output   longest prompt and output, in tokens
    beams            probability that a request has several beams
    words            probability that a request has stop words, or rules that forbid tokens
    adapted          probability that a request has an adapter
    handed           probability that a request is for another engine, or goes on with the blocks of one
    """

    arrival: float
    burst: int
    prompt: int
    output: int
    streams: float
    samples: float
    asks_more: float
    deadline: float
    prioritised: float
    stops: float
    invalid: float
    salted: float
    shares_prefix: float
    ends_early: float
    as_generator: float
    beams: float = 0.0
    words: float = 0.0
    adapted: float = 0.0
    handed: float = 0.0


@dataclass(frozen=True, slots=True)
class Swarm:
    """A configuration of the engine and of the world around it.

    iterations   iterations of the loop before the shutdown is requested
    adapters     number of task ids of adapters; 0: the engine has no adapters
    drafts       most drafts of a sequence in a step; 0: the engine does not draft
    drafts_right   probability that a draft is the right one
    draft_model   whether a draft model drafts
    adapter_pages, adapter_bytes   pages of the device for adapters, and bytes of the host cache
    late_ranks   with several ranks: None, or those that begin a step with rank 0, when it is read, as those of the last
                 of several stages do
    rank_callbacks   whether every rank has callbacks
    stored_blocks, stored_tokens   blocks that the store holds, and fewest tokens of a load; 0 blocks: there is no store
    transfers    None: no prompts for or from other engines
    faults       names of the faults of faults.py that may happen
    fault_rate   probability of a fault at each point where one can happen
    endings      (iteration, name) of each event that ends the run, such as a drain
    """

    seed: int
    iterations: int
    model_type: TrtGptModelType
    policy: SchedulerPolicy
    chunking: ContextChunkingPolicy | None
    overlap: bool
    tokens_per_block: int
    num_blocks: int
    max_seq_len: int
    max_batch_size: int
    max_num_tokens: int
    max_num_sequences: int | None
    max_queued_requests: int
    max_queued_tokens: int
    max_bytes_in_flight: int
    max_admissions: int
    exclude_input: bool
    flush_stats: bool
    has_poll: bool
    has_stats: bool
    vocab_size: int
    reuse: bool
    window: int | None
    sinks: int
    host_blocks: int
    traffic: Traffic
    faults: tuple[str, ...]
    fault_rate: float
    endings: tuple[tuple[int, str], ...]
    max_beam_width: int = 1
    run_ahead: bool = False
    is_asynchronous: bool = False
    ranks: int = 1
    late_ranks: tuple[int, ...] | None = None
    rank_callbacks: bool = False
    adapters: int = 0
    adapter_pages: int = 0
    adapter_bytes: int = 0
    drafts: int = 0
    drafts_right: float = 0.0
    draft_model: bool = False
    stored_blocks: int = 0
    stored_tokens: int = 1
    transfers: KvTransferConfig | None = None

    @property
    def is_static(self) -> bool:
        return self.model_type is TrtGptModelType.V1

    @property
    def depth(self) -> int:
        """The largest number of steps that are in flight at a time."""
        return 2 if self.overlap or self.run_ahead else 1


def draw(seed: int, features: Collection[str], iterations: int | None = None) -> Swarm:
    """Return the swarm of a seed.

    features     features of the engine (features.available)
    iterations   None: chosen by the seed
    """
    rng = Random(f"swarm {seed}")

    def one_in(n: int) -> bool:
        return rng.randrange(n) == 0

    model_type = rng.choice([TrtGptModelType.InflightFusedBatching] * 4 + [TrtGptModelType.InflightBatching,
                                                                           TrtGptModelType.V1])
    static = model_type is TrtGptModelType.V1
    policy = rng.choice([SchedulerPolicy.MAX_UTILIZATION] * 3 + [SchedulerPolicy.GUARANTEED_NO_EVICT] * 2)
    chunking = None if static else rng.choice([None, *ContextChunkingPolicy])
    tokens_per_block = rng.choice([1, 2, 3, 4, 4, 5, 8, 8, 16, 32, 64])
    max_seq_len = rng.choice([8, 16, 24, 40, 64, 100, 200])
    tightest = -(-max_seq_len // tokens_per_block)
    num_blocks = rng.choice([2, 3, tightest, tightest, tightest + 1, 2 * tightest, 3 * tightest, 4 * tightest, 64, 512])
    num_blocks = min(max(num_blocks, 2), 512)
    max_batch_size = rng.choice([1, 2, 3, 4, 6, 8, 8, 16, 64])
    max_num_tokens = rng.choice([tokens_per_block, 2 * tokens_per_block, max_seq_len, max_seq_len,
                                 max_seq_len + max_batch_size, 4 * max_seq_len, 8192])
    max_num_tokens = max(max_num_tokens, tokens_per_block, max_batch_size if one_in(2) else 1)

    window, sinks = None, 0
    if "window" in features and not static and one_in(3):
        window = rng.choice([tokens_per_block, max_seq_len // 2, max_seq_len // 3 + 1, max_seq_len - 1])
        window = max(window, 2)
        if "sinks" in features and one_in(2):
            sinks = rng.randint(1, max(window - 1, 1))
    reuse = "reuse" in features and not static and not sinks and not one_in(3)
    host_blocks = rng.choice([0, 4, 32]) if reuse and "host blocks" in features else 0

    prompt = min(rng.choice([3, tokens_per_block, 2 * tokens_per_block, max_seq_len]), max_seq_len - 1)
    traffic = Traffic(
        arrival=rng.choice([0.03, 0.06, 0.1, 0.2, 0.5]),
        burst=rng.choice([1, 1, 2, 4, 12]),
        prompt=max(prompt, 1),
        output=rng.choice([2, 6, 12, 30, max_seq_len]),
        streams=rng.choice([0.0, 0.3, 0.6, 1.0]),
        samples=rng.choice([0.0, 0.0, 0.5]),
        asks_more=rng.choice([0.0, 0.0, 0.0, 0.2]),
        deadline=rng.choice([0.0, 0.0, 0.2]),
        prioritised=rng.choice([0.0, 0.0, 0.5]),
        stops=rng.choice([0.0, 0.02, 0.1]),
        invalid=rng.choice([0.0, 0.05, 0.1]),
        salted=rng.choice([0.0, 0.5]),
        shares_prefix=rng.choice([0.0, 0.5, 0.9]),
        ends_early=rng.choice([0.0, 0.3, 1.0]),
        as_generator=rng.choice([0.0, 0.0, 0.3]))

    iterations_drawn = rng.choice([60, 150, 300, 600, 1000])
    if iterations is None:
        iterations = iterations_drawn
    possible = [fault for fault in MENU.values() if is_possible(fault, features, reuse=reuse)
                and fault.place not in (Place.ADAPTER, Place.DRAFTER, Place.STORE, Place.TRANSFER)]
    share = rng.choice([0.0, 0.15, 0.4, 0.8])
    faults = tuple(fault.name for fault in possible
                   if fault.place not in (Place.LIFE, Place.RANK, Place.INPUTS) and rng.random() < share)
    endings = _endings(rng, iterations, share)
    if "allocator.smallest_pool" in faults:
        num_blocks = max(tightest, 2)
    if not static and policy is SchedulerPolicy.MAX_UTILIZATION and one_in(3):
        tokens_per_block, max_batch_size, max_num_tokens, num_blocks, traffic = _pressure(rng, max_seq_len, traffic)
    max_beam_width, num_blocks, traffic = _beams_and_words(Random(f"beams {seed}"), num_blocks, faults, traffic)
    overlap = not static and one_in(3)
    window_rng, rank_rng = Random(f"window {seed}"), Random(f"ranks {seed}")
    run_ahead = not static and not overlap and window_rng.random() < 0.7
    # With several ranks, a step is launched when the steps of its requests have been read.
    ranks = 1 if static or run_ahead else rank_rng.choice([1, 2, 3, 4])
    rank_faults = [fault.name for fault in menu_of(Place.RANK) if ranks > 1 and rank_rng.random() < 0.3]
    late_ranks = None
    if ranks > 1 and rank_rng.random() < 0.5:          # several stages, and so several micro-batches
        overlap, late_ranks = True, tuple([rank for rank in range(1, ranks) if rank_rng.random() < 0.5])
    rank_callbacks = ranks > 1 and rank_rng.random() < 0.5
    if rank_callbacks:
        rank_faults += [fault.name for fault in menu_of(Place.INPUTS) if rank_rng.random() < 0.4]
    adapter_rng = Random(f"adapters {seed}")
    adapters, adapter_pages, adapter_bytes, adapted = _adapters(adapter_rng, features, static or ranks > 1)
    if adapters:
        traffic = replace(traffic, adapted=adapted)
        faults += tuple(fault.name for fault in menu_of(Place.ADAPTER) if adapter_rng.random() < 0.6)
    draft_rng = Random(f"drafts {seed}")
    drafts = 0
    if "drafts" in features and not static and draft_rng.random() < 0.8:
        drafts = min(draft_rng.choice([1, 2, 3, 7, 7, 20, 64]), max_num_tokens - 1)
    if drafts:
        faults += tuple(fault.name for fault in menu_of(Place.DRAFTER) if draft_rng.random() < 0.4)
    store_rng, stored_blocks, stored_tokens = Random(f"store {seed}"), 0, 1
    transfer_rng, transfers = Random(f"transfers {seed}"), None
    has_store = host_blocks and ranks == 1 and store_rng.random() < 0.7
    has_transfers = reuse and "host blocks" in features and ranks == 1 and transfer_rng.random() < 0.8
    if has_store or has_transfers:
        host_blocks = store_rng.choice([4, 10, 20])
        if store_rng.random() < 0.7:                   # prompts come back after their blocks are evicted
            tokens_per_block = store_rng.choice([1, 2, 4])
            num_blocks = min(-(-max_seq_len // tokens_per_block) + store_rng.choice([0, 1, 8]), 512)
            max_num_tokens = max(max_num_tokens, tokens_per_block)
            traffic = replace(traffic, prompt=max_seq_len - 1, output=min(traffic.output, 6), shares_prefix=0.9,
                              arrival=max(traffic.arrival, 0.2), salted=0.0, beams=min(traffic.beams, 0.2))
    if has_store:
        stored_blocks = store_rng.choice([3, 20, 400])
        stored_tokens = tokens_per_block * store_rng.choice([1, 1, 1, 2])
        faults += tuple(fault.name for fault in menu_of(Place.STORE) if store_rng.random() < 0.6)
    if has_transfers:
        transfers = KvTransferConfig(
            load_failure_policy=transfer_rng.choice(["recompute", "recompute", "fail"]),
            held_blocks_fraction=transfer_rng.choice([0.2, 0.5, 1.0]), timeout_s=transfer_rng.choice([0.2, 2, 60]),
            load_timeout_s=transfer_rng.choice([0.2, 2, 5]))
        traffic = replace(traffic, handed=transfer_rng.choice([0.2, 0.5, 0.9]))
        faults += tuple(fault.name for fault in menu_of(Place.TRANSFER) if transfer_rng.random() < 0.6)
    return Swarm(
        seed=seed,
        iterations=iterations,
        model_type=model_type,
        policy=policy,
        chunking=chunking,
        overlap=overlap,
        run_ahead=run_ahead,
        is_asynchronous=window_rng.random() < (0.8 if run_ahead else 0.3),
        tokens_per_block=tokens_per_block,
        num_blocks=num_blocks,
        max_seq_len=max_seq_len,
        max_batch_size=max_batch_size,
        max_num_tokens=max_num_tokens,
        max_num_sequences=rng.choice([None, None, 1, 3, 2 * max_batch_size, -1]),
        max_queued_requests=rng.choice([0, 1, 3, 20, 1024]),
        max_queued_tokens=rng.choice([10, 100, 4_000_000, 4_000_000]),
        max_bytes_in_flight=rng.choice([2_000, 1 << 32, 1 << 32, 1 << 32]),
        max_admissions=rng.choice([1, 3, 16, 64, 4096, 4096]),
        exclude_input=one_in(4),
        flush_stats=one_in(4),
        has_poll=not one_in(8),
        has_stats=not one_in(4),
        vocab_size=rng.choice([2, 5, 17, 100, 1000]),
        reuse=reuse,
        window=window,
        sinks=sinks,
        host_blocks=host_blocks,
        traffic=traffic,
        faults=(*faults, *rank_faults),
        ranks=ranks,
        late_ranks=late_ranks,
        rank_callbacks=rank_callbacks,
        fault_rate=rng.choice([0.005, 0.02, 0.08]),
        endings=endings,
        max_beam_width=max_beam_width,
        adapters=adapters,
        adapter_pages=adapter_pages,
        adapter_bytes=adapter_bytes,
        drafts=drafts,
        drafts_right=draft_rng.choice([0.0, 0.5, 0.8, 0.95, 1.0]),
        draft_model=drafts > 0 and not run_ahead and draft_rng.random() < 0.4,
        stored_blocks=stored_blocks,
        stored_tokens=stored_tokens,
        transfers=transfers)


def _adapters(rng: Random, features: Collection[str], static: bool) -> tuple[int, int, int, float]:
    """Return (task ids, pages, bytes of the host cache, probability of an adapter). One swarm in three has adapters."""
    if "adapters" not in features or static or rng.randrange(3):
        return 0, 0, 0, 0.0
    pages = rng.choice([1, 2, 3, 5, 8])
    one_page = FLOAT32 * ADAPTER_MODULES.page_elements
    return rng.choice([1, 2, 4, 9]), pages, one_page * pages * rng.choice([1, 2, 4, 40]), rng.choice([0.2, 0.6, 1.0])


def _beams_and_words(rng: Random, num_blocks: int, faults: Collection[str],
                     traffic: Traffic) -> tuple[int, int, Traffic]:
    """Return (beam width, number of blocks, traffic). One swarm in three has beams, and some have stop or bad words.

    Most swarms with beams get a pool of several times `num_blocks`.
    """
    max_beam_width = rng.choice([1, 1, 1, 1, 1, 1, 2, 3, 4])
    beams = rng.choice([0.2, 0.5, 1.0]) if max_beam_width > 1 else 0.0
    if beams and "allocator.smallest_pool" not in faults and rng.random() < 0.7:
        num_blocks = min(num_blocks * rng.randint(1, max_beam_width), 512)
    return max_beam_width, num_blocks, replace(traffic, beams=beams, words=rng.choice([0.0, 0.0, 0.0, 0.2, 0.6]))


def _pressure(rng: Random, max_seq_len: int, traffic: Traffic) -> tuple[int, int, int, int, Traffic]:
    """Return (tokens per block, batch size, tokens of a step, blocks, traffic) such that requests are paused.

    The pool is too small for a few long outputs at a time.
    """
    tokens_per_block = rng.choice([1, 2, 4])
    num_blocks = -(-max_seq_len // tokens_per_block) + rng.randrange(4)
    max_num_tokens = rng.choice([max_seq_len, max(max_seq_len // 2, tokens_per_block)])
    prompt = max(min(traffic.prompt, max_num_tokens, max_seq_len // 3), 1)
    return tokens_per_block, rng.choice([3, 4, 8]), max_num_tokens, num_blocks, replace(
        traffic, prompt=prompt, output=max_seq_len, arrival=0.2, ends_early=0.0, deadline=0.0,
        shares_prefix=max(traffic.shares_prefix, 0.5), salted=0.0)


def _endings(rng: Random, iterations: int, share: float) -> tuple[tuple[int, str], ...]:
    """Return the (iteration, name) of a drain or a terminate request at `iterations`, and of other endings near it.

    share   probability of each other ending
    """
    endings = [(iterations, "drain")]
    if rng.random() < 0.2:
        endings = [(iterations, "terminate request")]
    names = [fault.name for fault in menu_of(Place.LIFE) if fault.name in ENDINGS]
    for name in names:
        if rng.random() < share:
            endings.append((max(iterations + rng.randint(-iterations // 4, 6), 1), name))
    return tuple(sorted(endings))


def is_possible(fault: Fault, features: Collection[str], *, reuse: bool) -> bool:
    return fault.needs is None or (fault.needs in features and (fault.needs != "reuse" or reuse))
