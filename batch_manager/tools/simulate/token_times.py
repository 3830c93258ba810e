"""Times between tokens of one engine, step by step."""

import numpy as np

from ...requests.llm_request import LlmRequest
from .log_book import LogBook


class TokenTimes:
    """Records first tokens and times between tokens in a log book.

    Most requests got their last token in the step before. The times of the others are kept.
    """

    def __init__(self, log_book: LogBook) -> None:
        self._log_book = log_book
        self._last_end_s = 0.0                                  # of the last step
        self._last_token_s: dict[LlmRequest, float] = {}        # of requests that were left out of a later step

    def leave_out(self, active: list[LlmRequest], generating: list[LlmRequest]) -> None:
        """Note that the active requests with tokens get none in the next step, except those of `generating`."""
        planned = set(generating)
        for request in active:
            if request not in planned and request.total_generated_tokens:
                self._last_token_s.setdefault(request, self._last_end_s)

    def note(self, done: list[LlmRequest], generating: list[LlmRequest], now: float) -> None:
        """Record a token at `now`, the end of a step, for each request, before the token is added.

        done   requests whose context is done
        """
        book, last_token_s = self._log_book, self._last_token_s
        late = [request for request in generating if request in last_token_s] if last_token_s else []
        if in_time := len(generating) - len(late):
            book.add_gap(now - self._last_end_s, in_time)
        for request in done:
            if request.total_generated_tokens:      # it was paused
                late.append(request)
            else:
                book.first_s[request.request_id] = now
        for request in late:
            book.add_gap(now - last_token_s.pop(request), 1)
        self._last_end_s = now

    def note_steps(self, ends_s: np.ndarray, count: int) -> None:
        """Record a token of `count` requests at each of `ends_s`, the ends of steps, of which the first was noted."""
        if len(ends_s) > 1:
            self._log_book.add_gaps(np.diff(ends_s), count)
            self._last_end_s = float(ends_s[-1])
