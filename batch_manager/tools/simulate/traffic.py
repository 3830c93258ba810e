"""The requests of a simulation: columns of numbers, and prompts that are generated on demand."""

from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from ..datasets.records import Record
from ..traffic import PREFIX_TOKENS
from .backend import TOKEN

Prompt = Callable[[int], np.ndarray]
MOST_VOCABULARY = 1 << 30
STEP_OF_BLOCKS = 0x9E3779B1


@dataclass(frozen=True, slots=True)
class Turns:
    """The sessions of a traffic: the next turn arrives `think_s` after the answer to the one before.

    session    [n] int64, number of the session of each request; -1: the request is no turn
    number     [n] int64, which turn of its session the request is, from 1; 1 without a session
    think_s    [n] float64, seconds from the answer before to this turn
    following  index of a turn -> index of the next one
    """

    session: np.ndarray
    number: np.ndarray
    think_s: np.ndarray
    following: dict[int, int]

    @property
    def num_sessions(self) -> int:
        return int(np.count_nonzero((self.session >= 0) & (self.number == 1)))

    def columns(self) -> list[list[int | str]]:
        """Return the session and the turn of each request, each "" for a request that is no turn."""
        is_turn = self.session >= 0
        return [np.where(is_turn, column.astype(object), "").tolist() for column in (self.session, self.number)]

    @classmethod
    def of(cls, session: np.ndarray, think_s: np.ndarray) -> "Turns":
        """Return the turns of sessions, whose requests are in the order of their turns."""
        number, following, latest = np.ones(len(session), np.int64), {}, {}
        for index, each in enumerate(session.tolist()):
            if each >= 0:
                if (before := latest.get(each)) is not None:
                    following[before], number[index] = index, number[before] + 1
                latest[each] = index
        return cls(session, number, think_s, following)


class Traffic:
    """Requests in the order of their arrival.

    arrival_s       [n] float64, seconds, ascending, the first at 0 or later; that of a later turn is not used
    input_tokens    [n] int64, length of the prompt; that of a turn includes the earlier turns and their answers
    output_tokens   [n] int64, length of the output
    prompt          (index) -> [input tokens] int32, the tokens of the prompt
    prefixes        index -> ids of the prompt's blocks of 512 tokens (PREFIX_TOKENS); equal ids mean equal tokens.
                    None: unknown
    turns           the turns of sessions; None: no sessions

    The constructor raises ValueError for columns of different lengths.
    """

    def __init__(self, arrival_s: np.ndarray, input_tokens: np.ndarray, output_tokens: np.ndarray, prompt: Prompt, *,
                 prefixes: Sequence[tuple[int, ...]] | None = None, turns: Turns | None = None) -> None:
        if not len(arrival_s) == len(input_tokens) == len(output_tokens):
            lengths = len(arrival_s), len(input_tokens), len(output_tokens)
            raise ValueError(f"arrival_s, input_tokens and output_tokens have {lengths[0]:,}, {lengths[1]:,} and "
                             f"{lengths[2]:,} entries; expected the same number")
        self.arrival_s, self.input_tokens, self.output_tokens = arrival_s, input_tokens, output_tokens
        self.prompt, self.prefixes, self.turns = prompt, prefixes, turns

    def __len__(self) -> int:
        return len(self.arrival_s)

    @classmethod
    def of_records(cls, records: Iterable[Record]) -> "Traffic":
        """Make the traffic of records, which must be in the order of arrival.

        If a record has the tokens of its prompt, the prompt keeps them. Other prompts are generated, and share only the
        blocks with equal prefix ids. The prompt of a later turn has the earlier turns and their answers before its own
        tokens. An answer has as many tokens as requested, each of them the token that a simulated step generates.
        """
        times, inputs, outputs, sessions, think_s = array("d"), array("q"), array("q"), array("q"), array("d")
        prefixes: list[tuple[int, ...]] = []
        prompts: dict[int, np.ndarray] = {}
        for index, record in enumerate(records):
            times.append(record.time_s or 0.0)
            inputs.append(record.input_tokens)
            outputs.append(record.output_tokens)
            sessions.append(-1 if record.session is None else record.session)
            think_s.append(record.think_s)
            prefixes.append(record.prefix_ids)
            if record.prompt is not None:
                prompts[index] = np.array(record.prompt, np.int32)
        input_tokens, output_tokens = np.array(inputs, np.int64), np.array(outputs, np.int64)
        made = PromptMaker(input_tokens, prefixes if any(prefixes) else None)
        turns = Turns.of(np.array(sessions), np.array(think_s)) if max(sessions, default=-1) >= 0 else None
        before = {} if turns is None else {after: index for index, after in turns.following.items()}
        whole = input_tokens.copy()
        for index, earlier in sorted(before.items()):
            whole[index] += whole[earlier] + output_tokens[earlier]

        def prompt(index: int) -> np.ndarray:
            known = prompts.get(index)
            own = made(index) if known is None else known
            if (earlier := before.get(index)) is None:
                return own
            return np.concatenate([prompt(earlier), np.full(output_tokens[earlier], TOKEN, np.int32), own])

        is_made = not prompts and turns is None
        return cls(np.array(times, float), whole, output_tokens, made if is_made else prompt,
                   prefixes=prefixes if is_made else None, turns=turns)

    def repeated(self, times: int, arrival_s: np.ndarray) -> "Traffic":
        """Return the requests `times` times in their order, with other arrival times [times * n].

        The traffic must have no sessions. A generated prompt shares prefixes only with prompts of its repetition.
        Prompts with given tokens are repeated.
        """
        assert self.turns is None
        count, inputs = len(self), np.tile(self.input_tokens, times)
        prefixes, given = self.prefixes, self.prompt
        if prefixes is not None and any(prefixes):
            step = 1 + max(max(ids) for ids in prefixes if ids)
            prefixes = [tuple([block_id + number * step for block_id in ids])
                        for number in range(times) for ids in prefixes]
        elif prefixes is not None:
            prefixes = [()] * len(inputs)
        prompt: Prompt = lambda index: given(index % count)
        if isinstance(given, PromptMaker):
            prompt = PromptMaker(inputs, prefixes if prefixes and any(prefixes) else None)
        return Traffic(arrival_s, inputs, np.tile(self.output_tokens, times), prompt, prefixes=prefixes)


class PromptMaker:
    """Generates the prompt of the request with a given index. A call costs little more than a copy of the tokens.

    `prefixes` has ids for blocks of 512 tokens (PREFIX_TOKENS) at the start of a prompt. The tokens of such a block
    depend on its id only, so prompts with the same ids share them. All other tokens depend on the request.
    """

    def __init__(self, input_tokens: np.ndarray, prefixes: Sequence[tuple[int, ...]] | None) -> None:
        self._input_tokens, self._prefixes = input_tokens, prefixes
        self._ramp = np.arange(max(int(input_tokens.max(initial=1)), PREFIX_TOKENS), dtype=np.int32)

    def __call__(self, index: int) -> np.ndarray:
        count = int(self._input_tokens[index])
        tokens = self._ramp[:count] + np.int32(_first_token(index, 0x5BD1E995))
        for number, block_id in enumerate(self._prefixes[index] if self._prefixes is not None else ()):
            first = number * PREFIX_TOKENS
            size = min(PREFIX_TOKENS, count - first)
            if size <= 0:
                break
            tokens[first:first + size] = self._ramp[:size] + np.int32(_first_token(block_id, STEP_OF_BLOCKS))
        return tokens


def _first_token(number: int, step: int) -> int:
    return (number + 1) * step % (MOST_VOCABULARY - (1 << 26))
