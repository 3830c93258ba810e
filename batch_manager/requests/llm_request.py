"""A running request: its tokens, and its state with the table of all its transitions.

Other objects keep the blocks, sampling state, timings and deliveries of a request, by request id or by slot.
"""

from collections.abc import Hashable, Sequence

from ..adapter_values import AdapterContent
from ..names import LlmRequestState
from .retention import KvCacheRetentionConfig

CONTEXT, IN_PROGRESS, LAST_TOKEN, COMPLETE = (
    LlmRequestState.CONTEXT_INIT, LlmRequestState.GENERATION_IN_PROGRESS, LlmRequestState.GENERATION_TO_COMPLETE,
    LlmRequestState.GENERATION_COMPLETE)
# (state, event) -> next state. Nothing else changes a state; an event that is missing here is a fault of the caller.
TRANSITIONS: dict[tuple[LlmRequestState, str], LlmRequestState] = {
    (CONTEXT, "the last chunk is launched"): IN_PROGRESS,
    (CONTEXT, "the last chunk is launched, for one token"): LAST_TOKEN,
    (CONTEXT, "a launch is undone"): CONTEXT,
    (IN_PROGRESS, "a launch is undone"): CONTEXT,
    (LAST_TOKEN, "a launch is undone"): CONTEXT,
    (IN_PROGRESS, "one token is left"): LAST_TOKEN,
    (LAST_TOKEN, "one token is left"): LAST_TOKEN,
    (IN_PROGRESS, "no token is left"): COMPLETE,
    (LAST_TOKEN, "no token is left"): COMPLETE,
    (CONTEXT, "a pause"): CONTEXT,
    (IN_PROGRESS, "a pause"): CONTEXT,
    (LAST_TOKEN, "a pause"): CONTEXT,
    (CONTEXT, "an end"): COMPLETE,
    (IN_PROGRESS, "an end"): COMPLETE,
    (LAST_TOKEN, "an end"): COMPLETE,
    (COMPLETE, "an end"): COMPLETE,
}
GENERATING = (IN_PROGRESS, LAST_TOKEN)
NO_SLOT = -1


class LlmRequest:
    """One admitted request. Only the loop changes it, on the worker thread.

    request_id          the user's id
    tokens              for each beam, the prompt and the output
    orig_prompt_len     number of tokens of the user's prompt
    prompt_len          number of tokens of the context phase: the prompt, and after a pause also the kept output
    max_new_tokens      largest number of tokens to generate after the first prompt_len tokens
    final_length        largest length of the sequence, at which its output is complete; a pause does not change it
    beam_width, lora_task_id, priority   options of the request; larger priorities go first
    adapter             content of the LoRA adapter that `lora_task_id` names; None: no adapter, or not looked up yet
    draft_tokens        the draft tokens that the request's next generation step, or the last chunk of its context,
                        verifies
    draft_len           number of draft tokens
    step_tokens         tokens that a generation step of the request computes: one for each beam, and the draft tokens
    batch_key           equal for all members of a static batch; None without static batching
    cache_salt          only requests with the same salt share cached blocks
    token_extra_ids     one id per prompt token, for content that token ids do not distinguish; None: no such content
    retention           how long to keep the request's KV cache blocks; None: as long as other blocks
    in_lockstep         each step of the request must be read before the next one is launched, because the request has
                        beams or a user's function reads its tokens
    speculation         whether the engine may draft tokens for the request
    state               see TRANSITIONS; a launched last chunk counts as done
    context_position    number of computed context tokens, those of launched steps included
    context_read        number of computed context tokens whose step was read
    seq_slot            row of the per-sequence state, NO_SLOT before activation
    num_pauses          number of pauses
    computed_before_pause   largest number of leading tokens that were computed at a pause; 0 before any pause

    A step may be launched before the last step is read. `tokens` has only tokens that were read; the KV cache manager
    knows the length with launched steps included.
    """

    __slots__ = ("request_id", "tokens", "orig_prompt_len", "prompt_len", "max_new_tokens", "final_length",
                 "beam_width", "_draft_tokens", "draft_len", "step_tokens", "lora_task_id", "adapter", "priority",
                 "batch_key", "cache_salt", "token_extra_ids", "retention", "in_lockstep", "speculation", "state",
                 "context_position", "context_read", "seq_slot", "num_pauses", "computed_before_pause")

    def __init__(self, request_id: int, prompt: list[int], max_new_tokens: int, *, beam_width: int = 1,
                 draft_tokens: Sequence[int] = (), lora_task_id: int | None = None,
                 adapter: AdapterContent | None = None, priority: float = 0.5,
                 batch_key: Hashable = None, cache_salt: Hashable = None,
                 token_extra_ids: Sequence[int] | None = None, retention: KvCacheRetentionConfig | None = None,
                 in_lockstep: bool = False, speculation: bool = True) -> None:
        assert prompt and max_new_tokens >= 1 and beam_width >= 1
        self.request_id = request_id
        self.tokens = [list(prompt) for _ in range(beam_width)]
        self.orig_prompt_len = self.prompt_len = len(prompt)
        self.max_new_tokens = max_new_tokens
        self.final_length = len(prompt) + max_new_tokens
        self.beam_width = beam_width
        self.draft_tokens = draft_tokens
        self.lora_task_id = lora_task_id
        self.adapter = adapter
        self.priority = priority
        self.batch_key = batch_key
        self.cache_salt = cache_salt
        self.token_extra_ids = token_extra_ids
        self.retention = retention
        self.in_lockstep = in_lockstep or beam_width > 1
        self.speculation = speculation
        self.state = CONTEXT
        self.context_position = self.context_read = 0
        self.seq_slot = NO_SLOT
        self.num_pauses = self.computed_before_pause = 0

    @property
    def draft_tokens(self) -> Sequence[int]:
        return self._draft_tokens

    @draft_tokens.setter
    def draft_tokens(self, tokens: Sequence[int]) -> None:
        self._draft_tokens, self.draft_len = tokens, len(tokens)
        self.step_tokens = self.beam_width + self.draft_len

    @property
    def adapter_digest(self) -> bytes | None:
        """The name of the content of the request's adapter; None without an adapter."""
        return None if self.adapter is None else self.adapter.digest

    @property
    def num_tokens(self) -> int:
        """Number of prompt and generated tokens. Running beams have equal lengths."""
        return len(self.tokens[0])

    @property
    def num_generated_tokens(self) -> int:
        """Number of tokens generated since the last pause; without a pause, since admission. For schedulers."""
        return len(self.tokens[0]) - self.prompt_len

    @property
    def total_generated_tokens(self) -> int:
        """Number of tokens generated since admission."""
        return len(self.tokens[0]) - self.orig_prompt_len

    @property
    def remaining_context(self) -> int:
        """Number of context tokens that no launched step computes."""
        return self.prompt_len - self.context_position

    @property
    def is_context(self) -> bool:
        return self.state is CONTEXT

    @property
    def is_first_context_chunk(self) -> bool:
        return self.context_position == 0

    @property
    def is_generating(self) -> bool:
        return self.state in GENERATING

    @property
    def is_started(self) -> bool:
        """Whether the request has computed tokens that a pause would discard."""
        return self.state in GENERATING or (self.state is CONTEXT and self.context_position > 0)

    @property
    def is_finished(self) -> bool:
        return self.state is COMPLETE

    def skip_context(self, length: int) -> None:
        """Record that the first `length` tokens of the context are cached. The last token is always computed."""
        assert self.is_context and self.is_first_context_chunk and 0 <= length < self.prompt_len
        self.context_position = self.context_read = length

    def advance_context(self, chunk_length: int) -> None:
        """Record the launch of a chunk. The last chunk moves the request to the generation phase."""
        assert self.is_context and 0 < chunk_length <= self.remaining_context
        self.context_position += chunk_length
        if self.context_position == self.prompt_len:
            self._note("the last chunk is launched" if self.max_new_tokens > 1
                       else "the last chunk is launched, for one token")

    def unlaunch_context(self, start: int) -> None:
        """Undo the launch of the context tokens from position `start` on."""
        assert self.context_read <= start <= self.context_position
        self._note("a launch is undone")
        self.context_position = start

    def read_context(self, end: int) -> None:
        """Record that the context is computed, and its results are read, up to position `end`, exclusive."""
        assert self.context_read < end <= self.context_position
        self.context_read = end

    def add_token(self, token: int) -> bool:
        """Append a generated token (beam width 1). Returns whether the output is complete."""
        self.tokens[0].append(token)
        return self.note_length()

    def note_length(self) -> bool:
        """Update the state from the number of tokens (beam width 1). Returns whether the output is complete."""
        left = self.final_length - len(self.tokens[0])
        if left > 1:
            return False
        self._note("one token is left" if left else "no token is left")
        return not left

    def add_tokens(self, tokens: Sequence[int]) -> bool:
        """Append generated tokens (beam width 1). Returns whether the output is complete.

        The sequence must not become longer than final_length.
        """
        self.tokens[0].extend(tokens)
        return self.note_length()

    def propose(self, draft_tokens: Sequence[int]) -> None:
        """Set the draft tokens that the next generation step or last chunk verifies (beam width 1); may be empty.

        The number of draft tokens must be smaller than the number of tokens left to generate, so that all can be
        accepted.
        """
        assert self.beam_width == 1 and len(draft_tokens) < max(self.final_length - self.num_tokens, 1)
        self.draft_tokens = draft_tokens

    def add_to_beams(self, parents: Sequence[int], tokens: Sequence[int]) -> None:
        """Replace each beam by the sequence of its parent plus a token. The token must not complete the output."""
        before, taken = self.tokens, set()
        self.tokens = []
        for parent, token in zip(parents, tokens, strict=True):
            sequence = before[parent] if parent not in taken else before[parent][:-1]    # without the first child's
            taken.add(parent)
            self.tokens.append(sequence)
            sequence.append(token)
        left = self.final_length - self.num_tokens
        assert self.is_generating and left > 0
        if left == 1:
            self._note("one token is left")

    def set_beams(self, generated: Sequence[Sequence[int]]) -> None:
        """Replace the output by the results of the search, best first. The output of a beam without a result becomes
        empty."""
        prompt = self.tokens[0][:self.prompt_len]
        self.tokens = [prompt + list(output) for output in generated]
        self.tokens += [list(prompt) for _ in range(self.beam_width - len(generated))]

    def finish(self) -> None:
        self._note("an end")

    def num_recomputed(self, start: int, count: int) -> int:
        """Return how many of `count` context tokens from position `start` on were computed before a pause."""
        return max(min(start + count, self.computed_before_pause) - start, 0)

    def pause(self, max_input_len: int, num_computed: int = 0) -> None:
        """Move the request back to the context phase. The output becomes part of the context.

        num_computed   number of leading tokens that were computed before the pause

        Drops the generated tokens after the first max_input_len tokens of the sequence. With beams, drops all generated
        tokens.
        Source: TensorRT-LLM's LlmRequest::pause.
        """
        if self.beam_width > 1:
            self.tokens = [beam[: self.prompt_len] for beam in self.tokens]
        else:
            grown = max(self.prompt_len, min(max_input_len, self.num_tokens))
            del self.tokens[0][grown:]
            self.max_new_tokens -= grown - self.prompt_len
            self.prompt_len = grown
        self._note("a pause")
        self.context_position = self.context_read = 0
        self.num_pauses += 1
        self.computed_before_pause = max(self.computed_before_pause, num_computed)

    def _note(self, event: str) -> None:
        self.state = TRANSITIONS[self.state, event]

    def __repr__(self) -> str:
        return (f"LlmRequest({self.request_id}, {self.state.name}, prompt_len={self.prompt_len}, "
                f"generated={self.total_generated_tokens})")
