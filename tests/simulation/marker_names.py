"""The names of the markers of markers.py, and the feature of the engine that each of some markers needs."""

MARKERS = (
    # requests
    "prompt of one token", "prompt of a whole number of blocks", "prompt one short of a block",
    "prompt one over a block", "output of one token", "output cut to the longest sequence",
    "prompt and output fill the pool exactly", "longest possible prompt", "samples", "log-probs asked for",
    "likeliest tokens asked for", "several end ids", "timings asked for", "says when it arrived",
    "logits asked for", "streams to its end", "end id as first token", "end id on the last token allowed",
    "ends by length", "alive for a hundred iterations",
    # words
    "ends by stop word", "stop word on the last token allowed", "stop word begins in the prompt",
    "stop word begins before a pause", "a token is passed over", "a token is passed over after a pause",
    # beams
    "beams", "as many beams as there may be", "beams part", "a beam has no text", "a search ends early",
    "beams end by end id", "beams end by stop word", "beams end by length", "fewer texts than beams", "beams stopped",
    "beams stopped with texts", "beams timed out with texts", "beams refused as too large", "beams paused",
    "beams paused and finished", "beams and a context in one step", "another width waits", "beams in a static batch",
    "beams two micro-batches in flight", "beams fail", "beams leave the window", "beams find a prompt in the cache",
    "beams sample or return log-probs",
    # admission
    "refused as invalid", "refused as too large", "refused as a duplicate", "queue full", "item without an id",
    "duplicate of one that waits", "duplicate of one that runs", "more handed over than there is room for",
    "items wait unread for the next iteration", "queue in use", "overtaken by priority",
    "id reused at once", "id above two to the sixty-three", "unbounded sequences",
    # scheduling
    "paused", "paused twice", "paused five times", "paused after streaming", "paused between chunks",
    "paused with one token to go", "several paused at once", "paused and finished", "paused and stopped",
    "grown beyond one step while paused",
    "batch full", "token budget used up", "contexts only", "generation only", "contexts and generation together",
    "cut into chunks", "cut into three chunks or more", "two prompts cut in one step", "chunk and last chunk together",
    "somebody waits who could not run", "two micro-batches in flight",
    "ran ahead", "a chunk ran ahead", "somebody in lockstep waits while others run ahead",
    "a pause waits for the step in flight", "a row is discarded", "a step fails with another in flight",
    "a step fails behind a discarded row", "a step is run again without those who ended",
    "a step that ran ahead is taken back",
    "the first in line waits for those in flight", "the first in line waits for tokens",
    # blocks
    "pool exactly full", "pool full for five iterations", "pool emptied at once", "new block for a generated token",
    "slot reused in the iteration it came free",
    # ends
    "stopped while waiting", "stopped before its first token", "stopped between chunks", "stopped while streaming",
    "stopped while in flight", "stop on last token", "everybody stopped", "stop of somebody unknown",
    "stopped while paused", "timed out while waiting", "timed out before its first token", "timed out with tokens",
    "static batch holds finals", "static batch: one stopped who was done", "all idle in between",
    # faults
    "a step run in parts", "failed alone in a batch", "failed as a context", "failed on its last token",
    "several failed at once", "failed while another is paused", "a poisoned block is used again",
    "get is left alone after a failure", "shut down with a queue", "shut down with requests running",
    "shut down inside a callback", "drained", "terminate request with others alive", "engine failed with a queue",
    # later
    "prompt found in the cache", "part of a block found in the cache", "found and evicted in one step",
    "block left the window", "block brought back from the host",
    # drafts
    "drafts in a step", "drafts accepted", "drafts rejected", "drafts with the end of a request",
    "a request with drafts is paused", "drafts and a context in one step", "a draft model drafts",
    # a store
    "blocks come from the store", "an idle engine saves", "a load is not waited for", "one load for two",
    "stopped or timed out while loading",
    # other engines
    "a context is held", "a ticket lapses", "a ticket makes room", "another engine takes blocks",
    "blocks come from another engine", "a transfer falls back", "fails with its transfer",
    # adapters
    "an adapter runs", "an adapter is not in the cache", "an adapter is forgotten while it is in use",
)
NEEDS = {
    "prompt found in the cache": "reuse", "part of a block found in the cache": "reuse",
    "found and evicted in one step": "reuse", "block left the window": "window",
    "block brought back from the host": "host blocks", "beams leave the window": "window",
    **dict.fromkeys(("drafts in a step", "drafts accepted", "drafts rejected", "drafts with the end of a request",
                     "a request with drafts is paused", "drafts and a context in one step",
                     "a draft model drafts"), "drafts"),
    "beams find a prompt in the cache": "reuse", "an adapter runs": "adapters",
    **dict.fromkeys(("blocks come from the store", "an idle engine saves", "a load is not waited for",
                     "one load for two", "stopped or timed out while loading", "a context is held", "a ticket lapses",
                     "a ticket makes room", "another engine takes blocks", "blocks come from another engine",
                     "a transfer falls back", "fails with its transfer"), "host blocks"),
    "an adapter is not in the cache": "adapters", "an adapter is forgotten while it is in use": "adapters",
}
KNOWN = frozenset(MARKERS)
assert len(KNOWN) == len(MARKERS) and NEEDS.keys() <= KNOWN
