"""Synthetic traces: bursts, long-tailed lengths, and prompts with shared prefixes.

The traces use the random generator of Python, so that a seed gives the same trace with every version of the libraries.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from random import Random

from ..traffic import PREFIX_TOKENS, Arrival


@dataclass(frozen=True, slots=True)
class TraceShape:
    """Parameters of a trace of independent requests.

    request_rate   mean requests/s
    burstiness     standard deviation of the times between requests, divided by their mean; 1: a Poisson process; above
                   1: bursts
    input_*, output_*   median, sigma and largest value of the log-normal lengths of prompts and outputs, in tokens
    """

    request_rate: float = 2.0
    burstiness: float = 2.0
    input_median: float = 900.0
    input_sigma: float = 1.0
    input_longest: int = 7500
    output_median: float = 130.0
    output_sigma: float = 0.9
    output_longest: int = 1000


@dataclass(frozen=True, slots=True)
class ChatShape:
    """Parameters of conversations. A request continues an open conversation or begins a new conversation.

    continued        probability that a request continues an open conversation, if there is one
    open_at_most     largest number of open conversations; a new one beyond it closes the oldest
    system_tokens    length of each system prompt in tokens; each system prompt is half as frequent as the one before it
    turn_median, turn_sigma   median and sigma of the log-normal lengths of user turns, in tokens
    longest          most tokens of a prompt; a conversation ends before its prompt exceeds this number
    """

    continued: float = 0.6
    open_at_most: int = 40
    system_tokens: tuple[int, ...] = (1536, 700, 2600, 3100)
    turn_median: float = 180.0
    turn_sigma: float = 1.2
    longest: int = 16384


def sample_arrivals(count: int, seed: int, shape: TraceShape) -> Iterator[Arrival]:
    """Yield `count` independent requests in the order of arrival."""
    random = Random(f"requests {seed}")
    for at in _times(count, seed, shape):
        yield Arrival(at, _length(random, shape.input_median, shape.input_sigma, shape.input_longest),
                      _length(random, shape.output_median, shape.output_sigma, shape.output_longest))


@dataclass(slots=True)
class _Conversation:
    """An open conversation.

    num_tokens   number of tokens so far: system prompt, user turns and answers
    full_ids     ids of the full blocks of the latest prompt
    """

    num_tokens: int
    full_ids: list[int] = field(default_factory=list)


def sample_conversations(count: int, seed: int, shape: TraceShape, chat: ChatShape) -> Iterator[Arrival]:
    """Yield `count` requests, which are turns of conversations that share a few system prompts.

    Each request has the ids of its prompt's blocks. A prompt is the system prompt, the earlier turns with their
    answers, and the new turn. The input lengths of `shape` are not used.
    """
    random = Random(f"conversations {seed}")
    next_id = 0
    systems = [_Conversation(tokens) for tokens in chat.system_tokens]
    frequencies = [2.0 ** -i for i in range(len(systems))]
    talks: list[_Conversation] = []
    for at in _times(count, seed, shape):
        turn = _length(random, chat.turn_median, chat.turn_sigma, chat.longest // 4)
        output = _length(random, shape.output_median, shape.output_sigma, shape.output_longest)
        system = random.choices(systems, frequencies)[0]
        talk = random.choice(talks) if talks and random.random() < chat.continued else None
        if talk is not None and talk.num_tokens + turn > chat.longest:
            talks.remove(talk)
            talk = None
        if talk is None:
            if not system.full_ids:
                blocks = system.num_tokens // PREFIX_TOKENS
                system.full_ids = [*range(next_id, next_id + blocks)]
                next_id += blocks
            talk = _Conversation(system.num_tokens, [*system.full_ids])
            talks = [*talks, talk][-chat.open_at_most:]
        inputs = talk.num_tokens + turn
        new = math.ceil(inputs / PREFIX_TOKENS) - len(talk.full_ids)
        ids = [*talk.full_ids, *range(next_id, next_id + new)]
        next_id += new
        talk.num_tokens, talk.full_ids = inputs + output, ids[:inputs // PREFIX_TOKENS]
        yield Arrival(at, inputs, output, tuple(ids))


def _times(count: int, seed: int, shape: TraceShape) -> Iterator[float]:
    """Yield `count` times in seconds with gamma-distributed differences, rounded to 1 ms. The first time is 0."""
    random = Random(f"times {seed}")
    form = shape.burstiness ** -2
    now = 0.0
    for _ in range(count):
        yield round(now, 3)
        now += random.gammavariate(form, 1 / (form * shape.request_rate))


def _length(random: Random, median: float, sigma: float, longest: int) -> int:
    return max(1, min(longest, round(random.lognormvariate(math.log(median), sigma))))
