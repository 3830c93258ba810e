"""Texts for scripts and notebooks: prompts in, completions out. Needs tokenizers: the extra `text`.

    llm = LLM("folder/of/a/model")
    for completion in llm.generate(["It is a truth", "The evening was"], max_tokens=48):
        print(completion.text)
    for piece in llm.stream("Emma smiled, and"):
        print(piece, end="", flush=True)
    print(llm.chat([{"role": "user", "content": "Who is Emma?"}]).text)
"""

import os
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from queue import SimpleQueue
from time import monotonic
from typing import Any, Self

from ..aio.mailbox import Mailbox, RequestFailed, Wants
from ..aio.switchboard import Switchboard
from ..config import Parts, TrtGptModelOptionalParams
from ..engine_info import EngineInfo
from ..errors import InvalidRequestError, ManagerClosedError, type_name
from ..gpt_manager import GptManager
from ..names import ErrorCode, FinishReason, SchedulerPolicy, TrtGptModelType
from ..requests.inference_request import InferenceRequest
from .chat_template import chat_prompt
from .generated_text import GeneratedText
from .sampling import Sampling
from .text import TextStream
from .tokenizer import encode, load_tokenizer

__all__ = ["LLM", "Completion", "RequestFailed", "TextPieces", "Timings"]

Prompt = str | list[int] | list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds since the request was handed over to the engine, which may not have had room for it at once.

    first_token_s   until its first token arrived; None: none did
    total_s         until its end
    """

    first_token_s: float | None
    total_s: float


@dataclass(slots=True)
class Completion:
    """What was generated after one prompt.

    text            without special tokens, up to a stop string
    tokens          without the end id, up to the one that completed a stop string
    finish_reason   END_ID, STOP_WORDS (a stop string too), LENGTH, TIMED_OUT or CANCELLED; NOT_FINISHED after an error
    log_probs       of each token, where they were asked for; else empty
    top_log_probs   of each token the likeliest ones and their log-probabilities, likeliest first, where asked for
    error           why there is no more text: code, message, is_retryable; None: the text is whole
    timings         None for a prompt that never reached the engine
    prompt_tokens   of the prompt
    cached_tokens   of those, the ones that the KV cache had. None: the engine did not say, as it does when it ends a
                    text itself; it does not at a stop string, a cancellation or an error
    """

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    finish_reason: FinishReason = FinishReason.NOT_FINISHED
    log_probs: list[float] = field(default_factory=list)
    top_log_probs: list[dict[int, float]] = field(default_factory=list)
    error: RequestFailed | None = None
    timings: Timings | None = None
    prompt_tokens: int = 0
    cached_tokens: int | None = None


class LLM:
    """A model that continues texts, in the calling thread.

    model              folder of a Hugging Face checkpoint: config.json, *.safetensors, tokenizer.json; or a .gguf file
    tokenizer          one of `tokenizers` or transformers, or the folder or .gguf file of one; None: the model's
    return_stats       called with each record of statistics, a JSON text, on the engine's thread; see GptManager
    scheduler_policy, parts   see GptManager
    params             fields of TrtGptModelOptionalParams, such as device, max_batch_size and kv_cache_config

    A prompt is a text, a list of token ids, or a list of messages for the model's chat template. Options of a text are
    the fields of `batch_manager.extras.sampling.Sampling`, with the defaults of web servers: 256 tokens, temperature 1
    over all tokens, a fresh seed, the checkpoint's end ids. `temperature=0` always takes the likeliest token, and
    `seed=7` gives the same text again.

    It works where an event loop runs, as in a notebook, because it has none. Several threads may use it at a time.
    Ctrl-C stops the requests of the call that it interrupts, and the LLM can be used again. It ends with `close`, with
    its `with` block, with the interpreter, and where nothing refers to it any more.

    Raises what GptManager raises, and ConfigError where there is no tokenizer.
    """

    def __init__(self, model: str | os.PathLike, *, tokenizer: Any = None,
                 scheduler_policy: SchedulerPolicy = SchedulerPolicy.GUARANTEED_NO_EVICT, parts: Parts | None = None,
                 return_stats: Callable[[str], None] | None = None, **params: Any) -> None:
        optional_params = TrtGptModelOptionalParams(**params)
        is_folder = tokenizer is None or isinstance(tokenizer, str | os.PathLike)
        self._source = model if tokenizer is None or not is_folder else tokenizer
        self._tokenizer = load_tokenizer(self._source) if is_folder else tokenizer
        TextStream(self._tokenizer)            # raises where it is none
        switchboard = self._switchboard = Switchboard()
        parts = Parts() if parts is None else parts
        if isinstance(parts, Parts):           # else the manager says so
            parts = switchboard.hooked_into(parts)
        self._manager = GptManager(model, TrtGptModelType.InflightFusedBatching, 1, scheduler_policy, switchboard.get,
                                   switchboard.send, switchboard.poll, return_stats, optional_params, parts=parts,
                                   exclude_input_in_output=True)

    def generate(self, prompts: Iterable[Prompt] | str, **options: Any) -> list[Completion]:
        """A completion for each prompt, in order; any number of them. A text is one prompt.

        A prompt that cannot be used, and a request that fails, cost their own completion, whose `error` says why.

        Raises TypeError for an option that is none, ConfigError for a `stop` that is none, and ManagerClosedError after
        `close`.
        """
        sampling = Sampling.of(options)
        self._check_open()
        waiting = iter([prompts] if isinstance(prompts, str) else prompts)
        completions: list[Completion] = []
        alive: dict[int, _Request] = {}
        inbox, most_alive, has_more = _Inbox(), 2 * self.info.max_batch_size, True
        try:
            while has_more or alive:
                while has_more and len(alive) < most_alive:
                    prompt = next(waiting, _NO_MORE)
                    if prompt is _NO_MORE:
                        has_more = False
                        break
                    completions.append(Completion())
                    try:
                        request = self._prepare(prompt, sampling, inbox, completions[-1])
                    except InvalidRequestError as error:
                        completions[-1].error = RequestFailed(error.code, str(error))
                        continue
                    alive[request.mailbox.request_id] = request
                    request.hand_over()
                for mailbox in inbox.get() if alive else ():
                    request = alive.get(mailbox.request_id)
                    if request is not None:
                        request.read()
                        if request.is_over:
                            del alive[mailbox.request_id]
        finally:
            for request in alive.values():     # Ctrl-C, or what the prompts' own iterator raised
                request.stop()
        return completions

    def stream(self, prompt: Prompt, **options: Any) -> "TextPieces":
        """The text after one prompt, piece by piece.

        Raises InvalidRequestError for a prompt that cannot be used, and what `generate` raises.
        """
        sampling = Sampling.of(options)
        self._check_open()
        inbox = _Inbox()
        request = self._prepare(prompt, sampling, inbox, Completion())
        try:
            request.hand_over()
            return TextPieces(request, inbox)
        except BaseException:    # Ctrl-C, and the engine has it
            request.stop()
            raise

    def chat(self, messages: list[dict[str, Any]], *, tools: list[dict[str, Any]] | None = None,
             template_options: dict[str, Any] | None = None, **options: Any) -> Completion:
        """The model's answer to a conversation, by the model's chat template.

        messages           dictionaries with `role` and `content`
        tools              JSON schemas of functions, for templates that know them
        template_options   variables of the template, such as enable_thinking

        Raises ConfigError where there is no template, InvalidRequestError where it refuses the messages.
        """
        prompt = chat_prompt(self._source, messages, tools, **(template_options or {}))
        return self.generate([encode(self._tokenizer, prompt, add_special_tokens=False)], **options)[0]

    @property
    def info(self) -> EngineInfo:
        """Facts of the engine."""
        return self._manager.info

    @property
    def tokenizer(self) -> Any:
        return self._tokenizer

    def close(self, drain: bool = False, timeout: float | None = None) -> bool:
        """End the engine; see GptManager.shutdown. Does nothing the second time."""
        return self._manager.shutdown(drain, timeout)

    def __enter__(self) -> Self:
        self._manager.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _prepare(self, prompt: Prompt, sampling: Sampling, inbox: "_Inbox", completion: Completion) -> "_Request":
        prompt_ids = self._prompt_ids(prompt)
        completion.prompt_tokens = len(prompt_ids)
        tensors = {**sampling.tensors(prompt_ids, self.info), "return_perf_metrics": True}
        request = InferenceRequest(self._switchboard.next_id(), tensors, is_streaming=True, priority=sampling.priority,
                                   deadline_s=sampling.deadline_s)
        mailbox = Mailbox(request.request_id, Wants.of(request))
        mailbox.loop = inbox
        text = GeneratedText(self._tokenizer, prompt_ids, sampling.stop)
        return _Request(self._manager, self._switchboard, mailbox, request, text, completion)

    def _prompt_ids(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            return encode(self._tokenizer, prompt)
        if isinstance(prompt, list) and prompt and isinstance(prompt[0], dict):
            return encode(self._tokenizer, chat_prompt(self._source, prompt), add_special_tokens=False)
        if hasattr(prompt, "tolist"):
            prompt = prompt.tolist()
        if isinstance(prompt, list | tuple) and all(type(token) is int for token in prompt):
            return list(prompt)
        raise InvalidRequestError(f"a prompt is a {type_name(prompt)}",
                                  "a text, a list of token ids, or a list of messages",
                                  "pass prompts in a list, and a conversation to chat()")

    def _check_open(self) -> None:
        if self._switchboard.closed is not None:
            raise ManagerClosedError("the LLM was closed", "an LLM works until then", "make a new one")


class TextPieces:
    """The text after one prompt, as an iterator of pieces: whole characters, and never a part of a stop string.

    `completion` is what came so far, and whole where the iteration has ended. `cancel` stops the request, and so do
    leaving the loop and dropping the iterator. Several threads may read and cancel; each piece goes to one of them.

    `next` raises RequestFailed where the request was refused or failed, after the text that came before.
    """

    def __init__(self, request: "_Request", inbox: "_Inbox") -> None:
        self._request, self._inbox = request, inbox
        self._one_at_a_time = threading.RLock()      # what interrupts the thread that holds it may cancel

    @property
    def completion(self) -> Completion:
        return self._request.completion

    def cancel(self) -> None:
        """Stop the request and end the iteration, from any thread. Called twice, or after the end, it does nothing."""
        self._request.stop()
        with self._one_at_a_time:
            self._request.end(FinishReason.CANCELLED)
        self._inbox.wake()

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        request, error = self._request, None
        try:
            while not request.is_over:
                request.check_process()
                self._inbox.get()
                with self._one_at_a_time:
                    piece = request.read()
                if request.is_over:
                    self._inbox.wake()               # another thread may wait
                if piece:
                    return piece
            with self._one_at_a_time:
                error, request.failure = request.failure, None
        except BaseException:    # Ctrl-C
            self.cancel()
            raise
        if error is not None:
            raise error
        raise StopIteration

    def __del__(self) -> None:
        request = getattr(self, "_request", None)
        if request is not None:
            request.stop()


_NO_MORE = object()


class _Inbox:
    """Takes the place of an event loop for the switchboard; a thread waits here."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[list[Mailbox]] = SimpleQueue()

    def call_soon_threadsafe(self, _: object, mailboxes: list[Mailbox]) -> None:
        self._queue.put(mailboxes)

    def wake(self) -> None:
        """Let one `get` return."""
        self._queue.put([])

    def get(self) -> list[Mailbox]:
        """Wait until something arrived, and say for whom. Ctrl-C interrupts it in the main thread."""
        return self._queue.get()


class _Request:
    """One request on its way from the engine to its completion.

    failure   what `next` of an iterator raises once
    """

    def __init__(self, manager: GptManager, switchboard: Switchboard, mailbox: Mailbox, request: InferenceRequest,
                 text: GeneratedText, completion: Completion) -> None:
        self.mailbox, self.completion = mailbox, completion
        self.is_over, self.failure = False, None
        self._manager, self._switchboard = manager, switchboard      # a reader keeps the engine
        self._request, self._text = request, text
        self._handed_over = 0.0
        self._first_token: float | None = None

    def hand_over(self) -> None:
        self._handed_over = monotonic()
        self._switchboard.hand_over(self.mailbox, self._request)
        self._manager.notify()

    def check_process(self) -> None:
        """Raises ManagerClosedError in a forked child, where nothing ever arrives."""
        self._switchboard.check_process()

    def read(self) -> str:
        """The text that arrived. The completion has it too, and is whole once the request is over."""
        delta = None if self.is_over else self.mailbox.take()
        if delta is None:
            return ""
        if isinstance(delta, str):
            self.failure = self.completion.error = RequestFailed(*ErrorCode.of(delta), self._text.tokens)
            piece, reason = self._text.rest(), FinishReason.NOT_FINISHED
            self.is_over = True
        else:
            if self._first_token is None:
                self._first_token = monotonic()
            if delta.metrics is not None:
                self.completion.cached_tokens = delta.metrics.cached_tokens
            piece = self._text.add(delta)
            reason = self._text.finish_reason
            self.is_over = reason is not FinishReason.NOT_FINISHED
            if self.is_over and delta.finish_reason is FinishReason.NOT_FINISHED:
                self._stop()                   # a stop string: the engine does not know of it
        self.completion.text += piece
        if self.is_over:
            self._fill_in(reason)
        return piece

    def end(self, reason: FinishReason) -> None:
        """The reader has gone."""
        if not self.is_over:
            self.is_over = True
            self.completion.text += self._text.rest()
            self._fill_in(reason)

    def stop(self) -> None:
        """Stop it unless it is over. Never blocks."""
        if not self.is_over:
            self._stop()

    def _stop(self) -> None:
        if not (self.mailbox.is_cancelled or self.mailbox.has_ended):
            self._switchboard.stop(self.mailbox)
            with suppress(ManagerClosedError):               # in a forked child
                self._manager.notify()

    def _fill_in(self, reason: FinishReason) -> None:
        completion, text, since = self.completion, self._text, self._handed_over
        completion.tokens, completion.finish_reason = text.tokens, reason
        completion.log_probs, completion.top_log_probs = text.log_probs, text.top_log_probs
        first = None if self._first_token is None else self._first_token - since
        completion.timings = Timings(first, monotonic() - since)
