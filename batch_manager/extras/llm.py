"""Text generation for scripts and notebooks. Needs tokenizers: the extra `text`.

    llm = LLM("folder/of/a/model")
    for completion in llm.generate(["It is a truth", "The evening was"], max_tokens=48):
        print(completion.text)
    for piece in llm.stream("Emma smiled, and"):
        print(piece, end="", flush=True)
    print(llm.chat([{"role": "user", "content": "Who is Emma?"}]).text)
"""

import os
import threading
from _queue import SimpleQueue  # gevent replaces queue.SimpleQueue by a queue for greenlets
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from time import monotonic
from typing import Any, Self

from ..aio.adapter_names import AdapterNames
from ..aio.mailbox import Mailbox, RequestFailed, Wants
from ..aio.switchboard import WITHOUT_QUEUE_LIMITS, Switchboard
from ..config import Parts, TrtGptModelOptionalParams
from ..engine_info import EngineInfo
from ..errors import BatchManagerError, InvalidRequestError, ManagerClosedError, RequestError
from ..gpt_manager import GptManager
from ..names import ErrorCode, FinishReason, SchedulerPolicy, TrtGptModelType
from ..requests.inference_request import InferenceRequest
from .generated_text import GeneratedText
from .sampling import Sampling, check_end_ids, in_names_of_options
from .text_requests import Completion, Output, Prompt, Prompts, Timings, cache_of, check_adapter, each_prompt
from .turn_end import log_unused_turn_ends

__all__ = ["LLM", "Completion", "RequestFailed", "TextPieces", "Timings"]


class LLM:
    """A model with a blocking text interface.

    model              folder of a Hugging Face checkpoint (config.json, *.safetensors, tokenizer.json), or a .gguf file
    tokenizer          a tokenizer of `tokenizers` or transformers, or the path of its folder or .gguf file; None: the
                       model's tokenizer
    return_stats       called with each statistics record (JSON) on the engine's thread, see GptManager; None: no
                       statistics
    adapters           name -> folder of a LoRA adapter that the peft library wrote. `generate`, `stream` and `chat`
                       take a name as `adapter`. The cache has its default sizes unless peft_cache_config is given
    scheduler_policy, parts   the policy that chooses the requests of a step, and the user's objects that replace the
                       engine's; see GptManager
    params             fields of TrtGptModelOptionalParams, such as device, max_batch_size and kv_cache_config. Waiting
                       prompts have no limit unless max_queued_requests or max_queued_tokens is given

    A prompt is a string, a list of token ids, or a list of messages for the model's chat template. Sampling options are
    the fields of `batch_manager.extras.sampling.Sampling`. They default to 256 tokens, temperature 1 without top_k or
    top_p, a fresh seed, and the checkpoint's end ids. `temperature=0` is greedy; `seed=7` makes sampling repeatable.

    Works inside a running event loop, for example in a notebook. Thread-safe. Ctrl-C stops the requests of the
    interrupted call; the LLM stays usable. The engine ends at `close`, at the end of a `with` block, when the
    interpreter exits, or when the LLM is garbage-collected.

    Raises the exceptions of GptManager, and ConfigError if there is no tokenizer, or if the checkpoint has more than 8
    end ids.
    """

    def __init__(self, model: str | os.PathLike, *, tokenizer: Any = None,
                 scheduler_policy: SchedulerPolicy = SchedulerPolicy.GUARANTEED_NO_EVICT, parts: Parts | None = None,
                 return_stats: Callable[[str], None] | None = None,
                 adapters: Mapping[str, str | os.PathLike[str]] | None = None, **params: Any) -> None:
        optional_params = TrtGptModelOptionalParams(**{**WITHOUT_QUEUE_LIMITS, **cache_of(adapters), **params})
        self._prompts = Prompts(model, tokenizer)
        switchboard = self._switchboard = Switchboard()
        parts = Parts() if parts is None else parts
        if isinstance(parts, Parts):           # otherwise GptManager raises
            parts = switchboard.hooked_into(parts)
            self._sets_arrival_time = parts.clock is None
        self._manager = GptManager(model, TrtGptModelType.InflightFusedBatching, 1, scheduler_policy, switchboard.get,
                                   switchboard.send, switchboard.poll, return_stats, optional_params, parts=parts,
                                   exclude_input_in_output=True)
        self._adapters = AdapterNames(self._manager)
        try:
            check_end_ids(self.info)
            for name, folder in (adapters or {}).items():
                self._adapters.load(name, folder, replaces=False)
        except BatchManagerError:
            self.close()
            raise
        log_unused_turn_ends(self._prompts.source, self.tokenizer, self.info.end_ids, self.info.vocab_size)

    def generate(self, prompts: Iterable[Prompt] | str, *, adapter: str | None = None,
                 **options: Any) -> list[Completion]:
        """Return one completion per prompt, in order. A single string is one prompt.

        adapter   name of the adapter to generate with; None: the model as it is

        If a prompt is invalid or a request fails, only its own completion has an `error`.

        Raises TypeError for an unknown option, or if `prompts` is neither a string nor an iterable of prompts;
        InvalidRequestError for an invalid `stop`, and for an unknown `adapter`; and ManagerClosedError after `close`.
        """
        sampling, task_id = Sampling.of(options), self._task_id(adapter)
        self._check_open()
        arrived, waiting = monotonic(), each_prompt(prompts)
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
                        request = self._prepare(prompt, sampling, task_id, inbox, completions[-1], arrived)
                    except InvalidRequestError as error:
                        completions[-1].error = RequestFailed(error.code, str(error))
                        continue
                    alive[request.mailbox.request_id] = request
                    request.submit()
                for mailbox in inbox.get() if alive else ():
                    request = alive.get(mailbox.request_id)
                    if request is not None:
                        request.read()
                        if request.is_over:
                            del alive[mailbox.request_id]
        finally:
            for request in alive.values():     # Ctrl-C, or an exception of the iterable of prompts
                request.stop()
        return completions

    def stream(self, prompt: Prompt, *, adapter: str | None = None, **options: Any) -> "TextPieces":
        """Return an iterator over the output of one prompt, piece by piece.

        Raises InvalidRequestError for an invalid prompt or option, RequestFailed for what only the engine refuses, such
        as too long a prompt or an option out of its range, and the exceptions of `generate`.
        """
        sampling, task_id = Sampling.of(options), self._task_id(adapter)
        self._check_open()
        inbox = _Inbox()
        request = self._prepare(prompt, sampling, task_id, inbox, Completion(), monotonic())
        request.check()
        try:
            request.submit()
            return TextPieces(request, inbox)
        except BaseException:    # Ctrl-C after the request was submitted
            request.stop()
            raise

    def chat(self, messages: list[dict[str, Any]], *, tools: list[dict[str, Any]] | None = None,
             template_options: dict[str, Any] | None = None, **options: Any) -> Completion:
        """Format a conversation with the chat template, and return the model's answer to it.

        messages           dictionaries with `role` and `content`; see `chat_prompt` for other keys. A content may be a
                           list of parts of type text, which are joined
        tools              JSON schemas of functions. If the chat template writes calls in a known format, the answer
                           has its calls in `tool_calls`, and neither they nor reasoning are part of its text
        template_options   variables of the template, such as enable_thinking

        Raises ConfigError if there is no template, InvalidRequestError if the template rejects the messages or leaves
        out the tools, and the exceptions of `generate`.
        """
        return self.generate([self._prompts.chat(messages, tools, template_options)], **options)[0]

    @property
    def info(self) -> EngineInfo:
        """The engine's limits and model facts; see GptManager.info."""
        return self._manager.info

    @property
    def tokenizer(self) -> Any:
        return self._prompts.tokenizer

    def health(self) -> dict[str, Any]:
        """See GptManager.health."""
        return self._manager.health()

    def close(self, drain: bool = False, timeout: float | None = None) -> bool:
        """End the engine; see GptManager.shutdown. Idempotent."""
        return self._manager.shutdown(drain, timeout)

    def __enter__(self) -> Self:
        self._manager.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _prepare(self, prompt: Prompt, sampling: Sampling, task_id: int | None, inbox: "_Inbox", completion: Completion,
                 arrived: float) -> "_Request":
        tensors, text = self._prompts.request(prompt, sampling, self.info, completion)
        if task_id is not None:
            tensors["lora_task_id"] = task_id
        request = InferenceRequest(self._switchboard.next_id(), tensors, is_streaming=True,
                                   arrival_time=arrived if self._sets_arrival_time else None,
                                   **sampling.request_options)
        mailbox = Mailbox(request.request_id, Wants.of(request))
        mailbox.loop = inbox
        return _Request(self._manager, self._switchboard, mailbox, request, text, completion)

    def _task_id(self, adapter: str | None) -> int | None:
        check_adapter(self._adapters.infos, adapter)
        return None if adapter is None else self._adapters.task_id_of(adapter)

    def _check_open(self) -> None:
        if self._switchboard.closed is not None:
            raise ManagerClosedError("the LLM is closed", "a closed LLM generates nothing", "make a new one")


class TextPieces:
    """An iterator over the output of one prompt, in pieces of whole characters, without the stop string.

    `completion` has the output so far. It is complete when the iteration has ended. `cancel` stops the request.
    Dropping the iterator, for example by leaving the loop, also stops the request. Thread-safe; each piece goes to one
    thread.

    If the request is refused or fails, the iterator first returns the pieces generated before the failure. Then `next`
    raises RequestFailed once.
    """

    def __init__(self, request: "_Request", inbox: "_Inbox") -> None:
        self._request, self._inbox = request, inbox
        self._one_at_a_time = threading.RLock()      # reentrant: a signal handler may call cancel

    @property
    def completion(self) -> Completion:
        return self._request.completion

    def cancel(self) -> None:
        """Stop the request, and end this iterator. May be called from any thread; idempotent."""
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
                    self._inbox.wake()               # another thread may be waiting
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
    """A queue of mailboxes with new responses. A blocked reader waits in `get`.

    A mailbox holds the unread responses of one request. This queue is the `loop` of every mailbox, in place of an
    asyncio event loop: the worker passes the mailboxes with new responses to `call_soon_threadsafe`.
    """

    def __init__(self) -> None:
        self._queue: SimpleQueue[list[Mailbox]] = SimpleQueue()

    def call_soon_threadsafe(self, _: object, mailboxes: list[Mailbox]) -> None:
        self._queue.put(mailboxes)

    def wake(self) -> None:
        """Make a pending or future call of `get` return an empty list."""
        self._queue.put([])

    def get(self) -> list[Mailbox]:
        """Block until responses arrive, and return the mailboxes of their requests, one for each request.

        Ctrl-C interrupts the wait in the main thread.
        """
        return self._queue.get()


class _Request(Output):
    """One request, and the `Completion` that its responses fill in."""

    def __init__(self, manager: GptManager, switchboard: Switchboard, mailbox: Mailbox, request: InferenceRequest,
                 text: GeneratedText, completion: Completion) -> None:
        super().__init__(text, completion)
        self.mailbox = mailbox
        self._manager, self._switchboard = manager, switchboard      # keep the engine alive while a reader exists
        self._request = request

    def check(self) -> None:
        """Raise RequestFailed if the engine would refuse the request, whatever else runs."""
        try:
            self._manager.check(self._request)
        except RequestError as error:
            raise RequestFailed(error.code, in_names_of_options(str(error))) from None

    def submit(self) -> None:
        self._submitted_at = monotonic()
        self._switchboard.submit([(self.mailbox, self._request)])
        self._manager.notify()

    def check_process(self) -> None:
        """Raise ManagerClosedError in a forked child, where no response would arrive."""
        self._switchboard.check_process()

    def read(self) -> str:
        """Add new output to the completion, and return the text of the new output; "" if there is none."""
        delta = None if self.is_over else self.mailbox.take()
        if delta is None:
            return ""
        if isinstance(delta, str):
            return self.fail(RequestFailed(*ErrorCode.of(delta)))
        piece = self.add(delta)
        if self.is_over:
            self._stop()                       # after a stop string, the engine would continue
        return piece

    def stop(self) -> None:
        """Stop the request unless it is over. Never blocks."""
        if not self.is_over:
            self._stop()

    def _stop(self) -> None:
        if not (self.mailbox.is_cancelled or self.mailbox.has_ended):
            self._switchboard.stop(self.mailbox)
            with suppress(ManagerClosedError):               # in a forked child
                self._manager.notify()
