"""The traits of a swarm, such as its policy. A campaign reports how often each trait occurred."""

from collections import Counter
from collections.abc import Iterator

from .swarm import Swarm


def traits(swarm: Swarm) -> Iterator[tuple[str, str]]:
    """Yield the traits of a swarm as (property, value as text), such as ("reuse", "off")."""
    traffic = swarm.traffic
    yield "model type", swarm.model_type.name
    yield "policy", "STATIC_BATCH" if swarm.is_static else swarm.policy.name
    yield "chunking", "off" if swarm.chunking is None else swarm.chunking.name
    yield "micro-batches in flight", str(swarm.depth)
    yield "ranks", str(swarm.ranks)
    yield "callbacks on every rank", str(swarm.rank_callbacks)
    yield "steps begin on rank 0", "at the launch" if swarm.late_ranks is None else "when they are read"
    yield "tokens per block", str(swarm.tokens_per_block)
    yield "blocks", within(swarm.num_blocks, 2, 4, 16, 64, 256, 512)
    yield "batch", within(swarm.max_batch_size, 1, 2, 4, 8, 16, 64)
    yield "longest sequence", str(swarm.max_seq_len)
    yield "tokens in a step", within(swarm.max_num_tokens, 1, 8, 64, 512, 8192)
    yield "beams", str(swarm.max_beam_width)
    yield "reuse", "off" if not swarm.reuse else "with salts" if traffic.salted else "on"
    yield "host blocks", str(swarm.host_blocks)
    yield "store", str(swarm.stored_blocks or "none")
    yield "other engines", "none" if swarm.transfers is None else swarm.transfers.load_failure_policy
    yield "window", "none" if swarm.window is None else "with sinks" if swarm.sinks else "without sinks"
    yield "adapters", "none" if not swarm.adapters else f"{swarm.adapters} in {swarm.adapter_pages} pages"
    yield "drafts", "none" if not swarm.drafts else f"{swarm.drafts}, {swarm.drafts_right:.0%} right"
    yield "drafter", "none" if not swarm.drafts else "draft model" if swarm.draft_model else "custom"
    yield "streaming", f"{traffic.streams:.0%}"
    yield "sampling", f"{traffic.samples:.0%}"
    yield "stop words and bans", f"{traffic.words:.0%}"
    yield "deadlines", f"{traffic.deadline:.0%}"
    yield "priorities", f"{traffic.prioritised:.0%}"
    yield "queue", within(swarm.max_queued_requests, 0, 1, 20, 1024)
    yield "sequences", {None: "as the batch", -1: "unbounded"}.get(swarm.max_num_sequences, "bounded")
    yield "kinds of faults", within(len(swarm.faults), 0, 1, 10, 20, 48)


def within(number: int, *ends: int) -> str:
    """Return the range between two consecutive `ends` that contains the number, as text. The upper end is included."""
    last = ends[0]
    if number <= last:
        return str(last)
    for end in ends[1:]:
        if number <= end:
            return str(end) if last + 1 == end else f"{last + 1}-{end}"
        last = end
    return f"over {last}"


def table(counts: Counter[tuple[str, str]]) -> list[str]:
    """Return a line for each property, with the number of swarms that have each value.

    counts   (property, value) -> number of swarms
    """
    lines = []
    for name in dict.fromkeys(name for name, _ in counts):
        kinds = sorted(((kind, count) for (its, kind), count in counts.items() if its == name), key=_numbers_in_order)
        lines.append(f"{name + ':':<24} {', '.join(f'{kind} ({count:,})' for kind, count in kinds)}")
    return lines


def _numbers_in_order(row: tuple[str, int]) -> tuple[float, str]:
    digits = row[0].split("-")[0].rstrip("%")
    return (float(digits) if digits.isdigit() else -1.0), row[0]
