"""How the simulated device samples for sequences with stop words, bad words, penalties or similar rules.

Like a real device, it keeps the tokens of such sequences outside the KV cache: the tokens of the `SlotSetup`, and the
tokens that were sampled since. The device gets a new `SlotSetup` after a pause. A wrong setup therefore changes the
output. oracle.py computes the expected output.
"""

from collections import Counter
from collections.abc import Callable
from itertools import islice

import numpy as np

from batch_manager.handover import END_ID, NOT_FINISHED, STOP_WORDS, ScheduledBatch, SlotSetup, StepOutput
from batch_manager.requests.llm_request import LlmRequest
from batch_manager.testing.scripted_tokens import POSITION_FACTOR, WORD, mix

HELD_AMONG = 4
PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")


class SlotRules:
    """The sampling rules of one sequence, and the tokens of the sequence so far."""

    def __init__(self, setup: SlotSetup) -> None:
        self.setup = setup
        self._tokens = setup.history.tolist()
        self.has_paused = len(self._tokens) > setup.prompt_length

    @staticmethod
    def needed(setup: SlotSetup) -> bool:
        return not setup.has_beams and bool(
            setup.sampling.sets(("no_repeat_ngram_size", "min_length", *PENALTIES)) or setup.bad_words
            or setup.stop_words or setup.embedding_bias is not None)

    def draw(self, word: int, length: int, vocab_size: int) -> tuple[int, int, int]:
        """Sample the token after the first `length` tokens. Returns (token, finish code, hash for the log-probability).

        Tokens after the first `length` ones are dropped, because a step may be sampled again.
        """
        del self._tokens[length:]
        setup, tokens = self.setup, self._tokens
        banned = self._banned(length)
        first = (word >> 16) % vocab_size
        allowed = (j for j in range(vocab_size) if (first + j) % vocab_size not in banned)
        place = next(allowed, 0)
        if setup.sampling.sets(PENALTIES):
            held = set(tokens)
            place = min([place, *islice(allowed, HELD_AMONG - 1)], key=lambda j: ((first + j) % vocab_size in held, j))
        token = (first + place) % vocab_size
        tokens.append(token)
        finish = NOT_FINISHED
        if token in setup.end_ids:
            finish = END_ID
        elif any(tuple(tokens[-len(stop):]) == stop for stop in setup.stop_words):
            finish = STOP_WORDS
        return token, finish, mix(word + place * POSITION_FACTOR) if place else word & WORD

    def _banned(self, length: int) -> set[int]:
        setup, tokens, size = self.setup, self._tokens, self.setup.sampling.no_repeat_ngram_size
        banned = {word[-1] for word in setup.bad_words
                  if len(word) == 1 or tuple(tokens[-(len(word) - 1):]) == word[:-1]}
        if length < setup.prompt_length + setup.sampling.min_length:
            banned.update(setup.end_ids)
        if 0 < size <= len(tokens):
            last = tokens[len(tokens) - size + 1:]
            banned.update(tokens[i + size - 1] for i in range(len(tokens) - size + 1) if tokens[i:i + size - 1] == last)
        return banned


class Drawing:
    """Keeps the sampling rules of all sequences, by slot, and samples by them. `seen` counts markers."""

    def __init__(self, check: Callable[[bool, str], None], seen: Counter[str]) -> None:
        self._check, self._seen = check, seen
        self._rules: dict[int, SlotRules] = {}

    def set_up(self, batch: ScheduledBatch, owner_of: Callable[[int], LlmRequest]) -> None:
        """Keep the rules of the sequences that start in `batch`, and check the tokens of their setups."""
        for work in batch.context:
            if work.setup is None:
                continue
            setup, owner = work.setup, owner_of(work.slot)
            self._check(setup.history.tolist() == owner.tokens[0],
                        f"I8: the device was told other tokens than {owner} has")
            if SlotRules.needed(setup):
                self._rules[work.slot] = SlotRules(setup)
            else:
                self._rules.pop(work.slot, None)

    def __bool__(self) -> bool:
        return bool(self._rules)

    def draw_with_drafts(self, slot: int, words: np.ndarray, lengths: np.ndarray, vocab_size: int,
                         plain: tuple[list[int], list[int], np.ndarray]) -> tuple[list[int], list[int], np.ndarray]:
        """Return what ScriptedBackend._draw_with_drafts returns, which is `plain` without rules."""
        rules = self._rules.get(slot)
        if rules is None:
            return plain
        drawn = [rules.draw(int(word), int(length), vocab_size) for word, length in zip(words, lengths)]
        tokens, ends, of_log_probs = zip(*drawn)
        self._seen["a token is passed over"] += [*tokens] != plain[0]
        return [*tokens], [*ends], np.array(of_log_probs, np.uint64)

    def draw(self, output: StepOutput, words: np.ndarray, lengths: np.ndarray, asked: np.ndarray,
             vocab_size: int) -> None:
        """Replace in `output` the tokens of the sequences with rules.

        words     hash of each row, which decides the token and its log-probability
        lengths   number of tokens of each row so far
        asked     for each row, whether it returns log-probabilities
        """
        for row, slot in enumerate(output.slots.tolist()):
            rules = self._rules.get(slot)
            if rules is None:
                continue
            index = row if output.row_starts is None else output.row_starts[row]
            before = output.tokens[index]
            output.tokens[index], output.finish[row], word = rules.draw(int(words[row]), int(lengths[row]), vocab_size)
            if output.tokens[index] != before:
                self._seen["a token is passed over"] += 1
                self._seen["a token is passed over after a pause"] += rules.has_paused
            if asked[row]:
                output.log_probs[index] = -(word & 0xFFFF) / 4096
            if slot in output.top_log_probs:
                top = output.top_log_probs[slot]
                ranks = np.arange(top.ids.shape[1])
                known = ranks < vocab_size
                top.ids[0] = np.where(known, (int(output.tokens[index]) + ranks) % vocab_size, 0)
                top.log_probs[0] = np.where(known, -(word & 0xFFFF) / 4096 - ranks, -np.inf)
