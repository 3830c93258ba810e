"""Runs the requests of a world together in one engine, and each alone in a plain one, and compares the outcomes."""

import contextlib
import dataclasses
import json
import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from batch_manager import (
    ConfigError,
    ErrorCode,
    FinishReason,
    GptManager,
    InferenceRequest,
    KvCacheConfig,
    KvTransferConfig,
    ParallelConfig,
)
from batch_manager.handover import RowFailure, ScheduledBatch
from batch_manager.kv.audit import audit
from batch_manager.requests.adapter_content import read_adapter
from batch_manager.testing.scripted_backend import ScriptedBackend
from tests.harness.adapters import random_content, tensors_of
from tests.harness.client import ArrivingClient
from tests.harness.drafters import KnowingDrafter
from tests.harness.store_threads import HeldThreads
from tests.harness.warm_up import without_warm_up
from tests.harness.world import engine_arguments, make_loop

from .features import FEATURES
from .pairs import MARKS, REASONS
from .world import END_OF_A_GRAMMAR, MAX_SEQ_LEN, VOCAB, Ask, World

FIRST_LETTER = 60                        # the tokens of the small models from this one on are ASCII, from the space on
MOST_ITERATIONS = 2_000
PROJECTIONS = 14                         # of a small model: seven in each of two layers
SECONDS_TO_END = 30                      # for other ranks, after rank 0 has ended
LOG_PROBS_WITHIN, LOGITS_WITHIN = 2e-4, 2e-3
MOST_BYTES_ON_DISK = 1 << 30
HOST_BLOCK_BYTES = 1 << 15               # no block of a small model is larger
PER_TOKEN = ("output_log_probs", "generation_logits", "top_log_probs", "top_log_prob_ids")


@dataclass
class Run:
    """What an engine answered.

    trace      the iterations
    records    the statistics
    ahead      numbers of the iterations after which a step was in flight
    loaded     ids of the requests that waited for blocks from a disk, and got some
    outcomes   request id -> its outcome, see `outcome_of`
    drafter    of a world with drafts
    kv_cache_dtype   that the engine says it has
    """

    world: World
    drafter: KnowingDrafter | None = None
    kv_cache_dtype: str = ""
    trace: list[Any] = field(default_factory=list)
    records: list[dict[str, Any]] = field(default_factory=list)
    ahead: set[int] = field(default_factory=set)
    loaded: set[int] = field(default_factory=set)
    outcomes: dict[int, dict[str, Any]] = field(default_factory=dict)

    def chunks(self) -> Iterator[tuple[int, int, int, int]]:
        """Yield (request id, first position, tokens, end of the chunk before) of each context chunk.

        The end of the chunk before is 0 for a first chunk, and for the first one after a pause.
        """
        ends: dict[int, int] = {}
        for iteration in self.trace:
            for request_id in iteration.paused:
                ends.pop(request_id, None)
            for request_id, start, count in iteration.context:
                yield request_id, start, count, ends.get(request_id, 0)
                ends[request_id] = start + count

    def beams(self, request_id: int) -> list[list[int]]:
        return self.outcomes[request_id].get("tokens", [[]])

    def num_tokens(self, request_id: int) -> int:
        return max(map(len, self.beams(request_id)))

    def text(self, request_id: int) -> str:
        """The output of a small model, in the letters of its tokenizer."""
        return "".join(map(letter_of, self.beams(request_id)[0]))


class MatrixClient(ArrivingClient):
    """Hands over the requests of a world, stops one, and keeps the statistics."""

    def __init__(self, arrivals: list[tuple[int, InferenceRequest]], stops: dict[int, int], run: Run) -> None:
        super().__init__(arrivals)
        self._stop_at, self._run = stops, run

    def named_stops(self) -> set[int]:
        return {request_id for request_id, at in self._stop_at.items() if at <= self.iteration}

    def record_received(self, record: str) -> None:
        statistics = json.loads(record)
        self._run.records.append(statistics)
        if statistics["Iterations In Flight"]:
            self._run.ahead.add(self.iteration)


class Engines:
    """Makes the engines of worlds, and the reference of each request. `folder` gets the checkpoints of small models."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._guided, self._num_disks = folder, None, 0
        self._ranks = OtherRanks()

    def checkpoint(self, model: str) -> Path:
        from tests.deterministic.differential import make_checkpoint

        return make_checkpoint(model, self._folder)

    @property
    def guided(self) -> Any:
        """Guided decoding for the small models; made once."""
        if self._guided is None:
            from batch_manager.extras.guided_decoding import GuidedDecoding

            self._guided = GuidedDecoding(letters_tokenizer(), vocab_size=VOCAB["llama"], end_id=END_OF_A_GRAMMAR)
        return self._guided

    def request(self, ask: Ask, request_id: int, world: World, *, fails: bool = False) -> InferenceRequest:
        """Return the request of `ask` for one engine."""
        options = dict(ask.options)
        tensors = {"input_ids": ask.prompt, "request_output_len": ask.count, **ask.tensors}
        if ask.pattern:
            grammar = self.guided.regex(ask.pattern)
            self.guided.constrain(request_id, grammar)
            options["logits_post_processor"] = "batched" if ask.is_batched else self.guided.processor(grammar)
        if fails and ask.fate == "refused":
            tensors["input_ids"] = [*ask.prompt, 10 * world.vocab]
        if fails and ask.fate == "fails" and not world.is_scripted:
            options["logits_post_processor"] = raising_at(2)
        return InferenceRequest(request_id, tensors, **options)

    def make(self, world: World, client: MatrixClient, run: Run, *, disk: Path | None = None) -> Any:
        """Make the engine of a world. Raises ConfigError if its features are refused together.

        disk   directory of the prompt cache on disk
        """
        options = {"max_seq_len": MAX_SEQ_LEN, **world.options}
        if world.has_contexts:
            options["kv_transfer_config"] = KvTransferConfig(held_blocks_fraction=0.9, load_timeout_s=60)
        if world.most_tokens is not None:
            options["max_num_tokens"] = world.most_tokens
        parts: dict[str, Any] = {"trace": run.trace.append}
        if "S" in world.letters:
            run.drafter = parts["drafter"] = KnowingDrafter(
                world.texts, world.vocab, world.right, world.seed, odd=0.1, iteration=lambda: client.iteration)
        kv = {"tokens_per_block": world.block, **world.kv}
        if disk is not None:
            kv |= {"disk_cache_path": disk, "disk_cache_size": MOST_BYTES_ON_DISK}
        if world.is_scripted:
            if world.host_blocks:
                kv["host_cache_size"] = 1
            failing = [ask.id for ask in world.asks if ask.fate == "fails"]
            backend = ScriptedBackend(
                vocab_size=world.vocab, max_seq_len=MAX_SEQ_LEN, num_blocks=world.num_blocks, num_slots=16,
                tokens_per_block=world.block, window=kv.get("max_attention_window"), host_blocks=world.host_blocks,
                sink=kv.get("sink_token_length", 0), is_asynchronous="A" in world.letters,
                on_step=FailingRow(failing).on_step, key=world.seed, adapter_pages=world.adapter_pages,
                verify="S" in world.letters)
            kv["tokens_per_block"] = 8
            return prepared(make_loop(client, backend=backend, parts=parts, exclude_input=True, as_arrays=True,
                                      kv_cache_config=KvCacheConfig(**kv), **options), world, run)
        kv |= {"max_tokens": world.num_blocks * world.block, "host_cache_size": world.host_blocks * HOST_BLOCK_BYTES}
        if any(ask.pattern for ask in world.asks):
            parts["logits_post_processor_batched"] = self.guided
        if world.adapter_pages:
            options["peft_cache_config"] = dataclasses.replace(
                options["peft_cache_config"], num_device_module_layer=world.adapter_pages * PROJECTIONS)
        options |= {"exclude_input": True, "device": "cpu", "dtype": "float32", "num_threads": 1,
                    "kv_cache_config": KvCacheConfig(**kv)}
        folder = self.checkpoint(world.model)
        config = self._ranks.start(world, folder, options)
        # Ranks warm up together, and drafts are timed then. Other engines compile nothing that a warm-up would prepare.
        with without_warm_up() if config is None and "S" not in world.letters else contextlib.nullcontext():
            loop = make_loop(client, model_path=folder, parts=parts, parallel_config=config, **options)
        return prepared(loop, world, run)

    def fill(self, world: World) -> Path:
        """Have an engine save prompts of a world in a new directory, half of them without their ends."""
        self._num_disks += 1
        disk, run = self._folder / f"disk {self._num_disks}", Run(world)
        asks = [without_end(ask, world.block) if ask.id % 2 else ask for ask in world.asks]
        client = MatrixClient([(ask.arrival, self.request(ask, ask.id, world)) for ask in asks], {}, run)
        loop = self.make(world, client, run, disk=disk)
        with closing(loop):
            drive(loop, client, {ask.id for ask in asks})
            while loop.stored is not None and loop.stored.is_saving:
                loop.stored._threads.turn()
                loop.step(accept_new=False)
        return disk

    @contextlib.contextmanager
    def contexts(self, world: World) -> Iterator[dict[int, Any]]:
        """Have an engine compute prompts of a world, half of them without their ends, and hand them over until the
        block ends. Yields request id -> context_phase_params.
        """
        run, arrivals = Run(world), []
        for ask in world.asks:
            if not ask.tensors.get("return_context_logits"):           # refused for these
                asked = self.request(without_end(ask, world.block) if ask.id % 2 else ask, ask.id, world)
                asked.request_type = "context_only"
                arrivals.append((ask.arrival, asked))
        client = MatrixClient(arrivals, {}, run)
        loop = self.make(world, client, run)
        with closing(loop):
            ids = [asked.request_id for _, asked in arrivals]
            drive(loop, client, set(ids))
            while loop.stored._not_submitted:
                loop.step(accept_new=False)
            finals = {number: client.responses[number][-1].tensors for number in ids}
            yield {number: tensors["context_phase_params"] for number, tensors in finals.items()
                   if "context_phase_params" in tensors}

    def together(self, world: World) -> Run:
        """Run all requests of a world in one engine. Raises ConfigError if the engine is refused."""
        run, draw = Run(world), Random(world.seed)
        try:
            disk = self.fill(world) if world.has_disk else None
            with self.contexts(world) if world.has_contexts else contextlib.nullcontext({}) as contexts:
                arrivals = [(ask.arrival, self.request(ask, ask.id, world, fails=True)) for ask in world.asks]
                for _, asked in arrivals:
                    if asked.request_id in contexts:
                        asked.request_type = "generation_only"
                        asked.context_phase_params = contexts[asked.request_id]
                stops = {ask.id: ask.arrival + draw.randint(1, 12) for ask in world.asks if ask.fate == "stopped"}
                client = MatrixClient(arrivals, stops, run)
                loop = self.make(world, client, run, disk=disk)
                with closing(loop):
                    drive(loop, client, {ask.id for ask in world.asks}, audited=True)
        finally:
            self._ranks.end()
        run.outcomes = {ask.id: outcome_of(client.responses[ask.id], ask) for ask in world.asks}
        return run

    def alone(self, world: World, without: Iterable[int] = ()) -> Run:
        """Run each request of a world alone, in an engine with only the features that define an output.

        without   ids of requests to leave out
        """
        plain = plain_world(world)
        run, outcomes = Run(plain), {}
        client = MatrixClient([], {}, run)
        loop = self.make(plain, client, run)
        with contextlib.closing(loop.backend):
            for ask in plain.asks:
                if ask.id in without:
                    continue
                client.waiting = [(0, self.request(ask, ask.id, plain))]
                drive(loop, client, {ask.id})
                outcomes[ask.id] = outcome_of(client.responses[ask.id], ask)
        run.outcomes = outcomes
        return run


@contextlib.contextmanager
def closing(loop: Any) -> Iterator[None]:
    """Close the backend of an engine at the end, and its store if it has one."""
    with contextlib.closing(loop.backend):
        try:
            yield
        finally:
            if loop.stored is not None:
                loop.stored.close()


def without_end(ask: Ask, block: int) -> Ask:
    """Return a request with the first half of the prompt, and at least a block of it."""
    length, tensors = min(max(len(ask.prompt) // 2, block) + 1, len(ask.prompt)), dict(ask.tensors)
    if "input_token_extra_ids" in tensors:
        tensors["input_token_extra_ids"] = tensors["input_token_extra_ids"][:length]
    return dataclasses.replace(ask, prompt=ask.prompt[:length], tensors=tensors)


def prepared(loop: Any, world: World, run: Run) -> Any:
    """Give an engine its adapters, if the world has any, and have its store run in its turns, if it has one."""
    run.kv_cache_dtype = loop.backend.info.kv_cache_dtype
    if world.adapter_pages:
        modules = loop.backend.info.adapter_modules
        for task_id, rank in FEATURES["L"].ranks.items():
            tensors = tensors_of(random_content(modules, task_id, rank).parts)
            loop.preparing.store.put(task_id, loop.preparing.check(read_adapter(tensors, 1 << 30)), keep=True)
    if loop.stored is not None:
        stored = loop.stored
        stored._threads = HeldThreads(world.seed % 3)
        if world.has_contexts:
            stored._fetchers = HeldThreads()
        take_ready = stored.take_ready

        def noted() -> list[Any]:
            waiting = stored._waiting
            ready = take_ready()
            run.loaded |= {one.admitted.request.request_id for one in waiting if one.load.num_right}
            return ready
        stored.take_ready = noted
    return loop


class OtherRanks:
    """The ranks other than rank 0 of one engine after another, in processes."""

    def __init__(self) -> None:
        self._running: list[Any] = []

    def start(self, world: World, folder: Path, options: dict[str, Any]) -> ParallelConfig | None:
        """Start the other ranks of a world's engine. Returns what rank 0 needs; None: there is one rank."""
        num_ranks = world.tensor_size * world.num_stages
        if num_ranks == 1:
            return None
        from tests.parallel.conftest import fork_server_context, free_port

        configs = [ParallelConfig(tensor_parallel_size=world.tensor_size, pipeline_parallel_size=world.num_stages,
                                  rank=rank, leader=f"127.0.0.1:{port}")
                   for port in [free_port()] for rank in range(num_ranks)]
        self._running = [
            fork_server_context().Process(target=follow, args=(folder, {**options, "parallel_config": config}),
                                          daemon=True) for config in configs[1:]]
        for process in self._running:
            process.start()
        return configs[0]

    def end(self) -> None:
        """Wait until the other ranks have ended."""
        running, self._running = self._running, []
        for process in running:
            process.join(SECONDS_TO_END)
            process.kill()
            process.join(60)
            process.close()


def follow(folder: Path, options: dict[str, Any]) -> None:
    """What a rank other than rank 0 runs. A refused engine is rank 0's to report."""
    with contextlib.suppress(ConfigError):
        GptManager(folder, **engine_arguments(**options), get_inference_requests_cb=None, send_response_cb=None
                   ).wait_until_terminate()


def plain_world(world: World) -> World:
    """Return the world of the reference: each request alone, without the features that must not change an output."""
    plain = World.__new__(World)
    kept = {"max_beam_width", "deterministic", "cpu_compile", "peft_cache_config", "quantization"}
    plain.__dict__ |= world.__dict__ | {
        "letters": "".join(letter for letter in world.letters if FEATURES[letter].defines_output),
        "most_tokens": None, "host_blocks": 0, "tensor_size": 1, "num_stages": 1,
        "num_blocks": 6 * 3 * (MAX_SEQ_LEN // world.block + 2), "has_disk": False, "has_contexts": False,
        "kv": {name: value for name, value in world.kv.items() if not name.startswith(("enable", "disk"))},
        "options": {name: value for name, value in world.options.items() if name in kept},
        "asks": [dataclasses.replace(ask, fate="") for ask in world.asks]}
    return plain


def drive(loop: Any, client: MatrixClient, waited_for: set[int], *, audited: bool = False) -> None:
    """Run iterations until these requests have their final responses, and no request is live."""
    for _ in range(MOST_ITERATIONS):
        loop.step(accept_new=True)
        client.iteration += 1
        if loop.stored is not None:
            loop.stored._threads.turn()
        assert loop.failure is None, loop.failure
        if audited:
            audit(loop.kv)
        if loop.is_empty and not client.waiting and all(client.finals(request_id) for request_id in waited_for):
            break
    else:
        raise AssertionError(f"still busy after {MOST_ITERATIONS} iterations")
    loop.step(accept_new=True)                   # drops steps in flight, which belong to no request
    client.iteration += 1
    assert loop.kv.used_blocks == 0 and not client.complaints, client.complaints


class FailingRow:
    """A hook of the scripted backend: requests of these ids fail at their second token."""

    def __init__(self, request_ids: Iterable[int]) -> None:
        self._ids, self._slots = set(request_ids), {}

    def on_step(self, batch: ScheduledBatch) -> dict[int, RowFailure]:
        for work in batch.context:
            if work.setup is not None:
                self._slots[work.slot] = work.setup.request_id
        failing = [slot for slot in batch.generation.slots.tolist() if self._slots[slot] in self._ids]
        return {slot: RowFailure(ErrorCode.NON_FINITE_LOGITS, "planted") for slot in failing}


def raising_at(call: int) -> Any:
    """Return a logits post-processor that raises in its call number `call`."""
    calls = 0

    def process(request_id: int, logits: Any, token_ids: list[list[int]]) -> Any:
        nonlocal calls
        calls += 1
        if calls >= call:
            raise RuntimeError("planted")
        return logits
    return process


# Outcomes.


def outcome_of(responses: list[Any], ask: Ask) -> dict[str, Any]:
    """Return what all responses to a request contain: tokens of each beam, tensors, finish reasons, code of an error.

    Pieces of a stream are joined. Tensors that the request did not ask for are left out.
    """
    pieces = [response for response in responses if not response.error]
    found: dict[str, Any] = {"finals": sum(response.final for response in responses), "error": responses[-1].error}
    if ask.width > 1 and pieces:
        final = pieces[-1].tensors
        found["tokens"] = [pieces[-1].tokens(beam) for beam in range(ask.width)]
        found["output_log_probs"] = np.concatenate([final["output_log_probs"][0, beam, :len(tokens)]
                                                    for beam, tokens in enumerate(found["tokens"])])
    else:
        found["tokens"] = [[token for response in pieces for token in response.tokens()]]
        for name in PER_TOKEN:
            if name == "output_log_probs" or f"return_{name.replace('_ids', 's')}" in ask.tensors:
                parts = [response.tensors[name][0, 0][:len(response.tokens())] for response in pieces]
                found |= {name: np.concatenate(parts)} if parts else {}
    if pieces:
        if "return_context_logits" in ask.tensors:
            found["context_logits"] = pieces[0].tensors["context_logits"]
        found |= {name: pieces[-1].tensors[name] for name in ("cum_log_probs", "finish_reason")}
    return found


def difference(ask: Ask, got: dict[str, Any], alone: dict[str, Any], *, bitwise: bool) -> str:
    """Return how the outcome of a request differs from that of the request alone; "" if it does not."""
    if got["finals"] != 1:
        return f"request {ask.id} has {got['finals']} finals"
    reason = int(got["finish_reason"].flat[0]) if "finish_reason" in got else None
    is_cut = ask.fate in ("fails", "refused") and bool(got["error"]) or (
        ask.fate == "stopped" and reason == FinishReason.CANCELLED)
    if got["error"] and not is_cut:
        return f"request {ask.id} ({''.join(sorted(ask.has))}) got the error {got['error']!r}"
    if ask.fate == "refused" and not got["error"].startswith("[INVALID_REQUEST]"):
        return f"request {ask.id} was not refused"
    if is_cut and ask.width > 1:
        return ""
    names = [name for name in ("tokens", *PER_TOKEN) if name in alone and name in got]
    if not is_cut:
        names += [name for name in ("context_logits", "cum_log_probs", "finish_reason") if name in alone]
    for name in names:
        one, other = got[name], alone[name]
        if is_cut:
            one, other = (one[0], other[0]) if name == "tokens" else (one, other)
            other = other[:len(one)]
        if not _same(name, one, other, bitwise):
            return (f"request {ask.id} ({''.join(sorted(ask.has))}) differs from itself alone in {name}: "
                    f"tokens {got['tokens']}, alone {alone['tokens']}, fate {ask.fate!r}")
    return ""


def _same(name: str, one: Any, other: Any, bitwise: bool) -> bool:
    if name == "tokens":
        return bool(one == other)
    one, other = np.asarray(one), np.asarray(other)
    if bitwise or not np.issubdtype(one.dtype, np.floating):
        return one.shape == other.shape and one.tobytes() == other.tobytes()
    within = LOGITS_WITHIN if "logits" in name else LOG_PROBS_WITHIN * max(1, one.size if "cum" in name else 1)
    return one.shape == other.shape and np.allclose(one, other, atol=within, rtol=1e-5)


# The tokenizer of the small models: each token is one character.

def letter_of(token: int) -> str:
    return chr(token - FIRST_LETTER + 32) if FIRST_LETTER <= token < FIRST_LETTER + 95 else "?"


def letters_tokenizer() -> Any:
    import tokenizers

    vocab = {f"<{token}>" if letter_of(token) == "?" else letter_of(token): token for token in range(VOCAB["llama"])}
    vocab["Ġ"] = vocab.pop(" ")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens([name for name in vocab if len(name) > 1])
    return tokenizer


@contextlib.contextmanager
def warnings_of_the_engine() -> Iterator[list[str]]:
    """Collect the package's warnings, and keep them from the log."""
    log, told = logging.getLogger("batch_manager"), []

    class Collect(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.levelno >= logging.WARNING:
                told.append(record.getMessage())

    handler, propagates = Collect(), log.propagate
    log.addHandler(handler)
    log.propagate = False
    try:
        yield told
    finally:
        log.removeHandler(handler)
        log.propagate = propagates


# Cells.

@dataclass
class Verdict:
    """What a world showed.

    wrong       how it differs from what the table says; "" if it does not
    met         number of requests for which all its features took effect; for `r`, number of refusals
    requests    number of requests that ran
    near_ties   number of requests whose tokens depend on rounding
    """

    wrong: str = ""
    met: int = 0
    requests: int = 0
    near_ties: int = 0


def judge(engines: Engines, letters: str, seed: int, model: str, *, exact: bool = False) -> Verdict:
    """Run one world with the features of `letters`, and compare it with what the table says about them.

    exact   see World
    """
    letters = "".join(dict.fromkeys(letters))
    pair = letters if len(letters) > 1 else 2 * letters
    mark, says = MARKS.get(pair, "="), REASONS[pair].says if pair in REASONS else ""
    world = World(letters, seed, model, exact=exact)
    has_all = {ask.id for ask in world.asks if len(ask.has) == len(letters)}
    both, near_ties = has_all if mark == "r" else set(), 0
    with warnings_of_the_engine() as told:
        try:
            run, wrong = compared(engines, world, both)
        except ConfigError as error:
            if mark == "r" and contains(str(error), says):
                return Verdict(met=1)
            return Verdict(f"{letters} {seed} {model}: the engine was refused: {error}")
        if len(wrong) == 1 and not world.is_exact:    # rounding, or a fault? With `deterministic`, nothing is rounded
            wrong, near_ties = compared(engines, World(letters, seed, model, exact=True), both)[1], 1
    met = [FEATURES[letter].proof(run) for letter in letters]
    if mark == "r":
        refused = {request_id for request_id in both if contains(run.outcomes[request_id]["error"], says)}
        wrong += [f"request {ask.id} was not refused" for ask in world.asks
                  if ask.id in both and not ask.fate and ask.id not in refused]
        met = [refused]
    if mark == "-":
        off = letters.index(REASONS[pair].off)
        if met.pop(off) & (has_all if REASONS[pair].of_request else {ask.id for ask in world.asks}):
            wrong.append(f"{FEATURES[letters[off]].name} is not off")
        if says and not any(contains(warning, says) for warning in told):
            wrong.append(f"no warning says {says!r}; the warnings are {told}")
        if REASONS[pair].missing and any(REASONS[pair].missing in record for record in run.records):
            wrong.append(f"the statistics have {REASONS[pair].missing!r}")
    return Verdict(f"{letters} {seed} {model}: {'; '.join(wrong)}" if wrong else "", len(set.intersection(*met)),
                   len(world.asks), near_ties)


def compared(engines: Engines, world: World, left_out: set[int]) -> tuple[Run, list[str]]:
    """Run a world together and alone. Returns the run, and the differences of the requests that are not left out."""
    alone = None
    if world.right:                                    # the drafter knows the texts
        alone = engines.alone(world, without=left_out)
        world.texts.update({ask: outcome["tokens"][0] for ask, outcome in alone.outcomes.items()})
    run = engines.together(world)
    return run, differences(world, run, alone or engines.alone(world, without=left_out), left_out)


def differences(world: World, run: Run, alone: Run, left_out: set[int]) -> list[str]:
    found = [difference(ask, run.outcomes[ask.id], alone.outcomes[ask.id], bitwise=world.is_exact)
             for ask in world.asks if ask.id not in left_out]
    return [text for text in found if text]


def contains(text: str, says: str) -> bool:
    """Whether a text has the parts of `says`, which are separated by `...`, in order."""
    place = 0
    for part in says.split("..."):
        place = text.find(part, place)
        if place < 0:
            return False
    return True
