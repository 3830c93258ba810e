"""The native backend: runs a loaded checkpoint with this package's models, attention and decoding."""

import dataclasses
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import numpy as np
import torch

from ..attention.block_sizes import refuse_large_blocks, refuse_small_blocks
from ..attention.interface import Attention
from ..attention.registry import make_attention
from ..attention.windows import effective_windows
from ..config import TrtGptModelOptionalParams
from ..contained_log import log
from ..decoding.decoder import GptDecoder
from ..decoding.logits_stage import LogitsStage
from ..decoding.sampled_step import UNUSABLE, SampledStep
from ..errors import ConfigError, InsufficientMemoryError, counted, type_name
from ..handover import (
    NO_UPDATES,
    BlockTableUpdates,
    ContextWork,
    GenerationWork,
    ScheduledBatch,
    SlotSetup,
    StepOutput,
)
from ..layers.recording import NotRecordableError, record_embedding
from ..models.loading import LoadedModel, load_model
from ..models.registry import Model
from ..models.spec import ModelSpec
from ..sampling_config import PARAMETERS, SamplingConfig
from ..seams import BackendInfo, MemoryUsage, PendingStep
from ..triton_kernels.attention_scratch import attention_scratch_bytes
from ..triton_kernels.context_work_list import MIN_KEYS_PER_PART
from ..triton_kernels.cpu.native.library import hold_helpers, release_helpers
from ..triton_kernels.decode_work_list import MIN_PAGES_PER_PART
from ..triton_kernels.dispatch import use_triton
from ..triton_kernels.sample_scratch import scratch_bytes
from . import packing
from .block_tables import BlockTables
from .device.devices import device_name, num_multiprocessors, resolve_device
from .device.memory import free_memory, release_memory
from .device.running import (
    AllocatedMemory,
    Readback,
    Readbacks,
    Uploads,
    finish_stream,
    first_line,
    is_out_of_memory,
    make_stream,
    on_device,
    on_stream,
)
from .forms.compiled.making import compile_step, obstacle_to_compiling
from .forms.fixed.form import FixedForm
from .forms.fixed.fused import FusedBody
from .forms.fixed.inputs import FixedInputs, can_bind
from .forms.fixed.launches import Launches
from .forms.fixed.making import make_fused_body
from .forms.fixed.shapes import MOST_CONTEXTS, NO_SIZES, graph_rows, largest_shapes, mixed_sizes
from .forms.form import NoForm, StepForm, traits_of
from .forms.graph.check import difference_of_graphs
from .forms.graph.form import WITHOUT_GRAPHS, GraphForm, capture, obstacle_to_graphs
from .kv_pool import block_bytes, block_operations, clear_block, make_host_pool, make_kv_pool
from .memory_plan import plan_host_blocks, plan_memory
from .model_runner import CallResult, ModelRunner, join_rows
from .operations import Operations
from .packing import Divide, slots_not_finite
from .parts import DeviceParts
from .thread_count import compute_threads, has_openmp, require_openmp, step_threads

LONG_SEQUENCE_BLOCKS = MIN_PAGES_PER_PART + 2      # long enough for attention to split it into parts
LONG_CONTEXT_TOKENS = 2 * MIN_KEYS_PER_PART        # likewise, for a context of one token
FLOAT32_BYTES = 4
SLOT_BYTES = 64                    # lower bound of a slot's state on the host, without its block table


def build_native_backend(model_path: str | os.PathLike, params: TrtGptModelOptionalParams, *, layout: Divide,
                         num_slots: int, max_beam_width: int = 1,
                         attention_factory: Callable[..., Attention] | None = None,
                         is_engine_thread: Callable[..., bool] = lambda thread: False,
                         own_stages: Callable[[int, torch.device], Sequence[LogitsStage]] | None = None,
                         ) -> "NativeBackend":
    """Load a checkpoint, allocate the KV cache pool, and run a warm-up.

    layout              a function of packing.py, which divides a step into calls of the model
    num_slots           number of sequences to allocate state for; the state grows if more arrive
    max_beam_width      largest number of beams of a sequence
    attention_factory   (spec, kv_pool) -> Attention. spec.attention has the effective windows: in each layer, the
                        smaller of the model's and the configured window. With sink tokens, the factory also gets
                        `sink=`; a factory without this parameter fails here. None: make_attention
    own_stages          (num_slots, device) -> custom stages, see decoding/stages.py; None: no custom stages
    is_engine_thread    (threading.Thread) -> whether the thread runs only the engine. The OpenMP and MKL thread counts
                        of such a thread stay at num_threads between steps
    Raises              ConfigError and its subclasses, after freeing all memory
    """
    device = resolve_device(params.device)
    not_captured = obstacle_to_graphs(params, device, layout, attention_factory is not None)
    compiles_attention = device.type == "cuda" and use_triton(device) and attention_factory is None
    if compiles_attention:
        refuse_small_blocks(params.kv_cache_config.tokens_per_block, device_name(device))
    if params.num_threads is not None and device.type == "cpu":
        require_openmp()
    obstacle = obstacle_to_compiling(params, device, attention_factory)
    compiles = not obstacle
    if params.deterministic:
        refuse_nondeterministic_parts(device, attention_factory)
    try:
        loaded = load_model(model_path, device=device, dtype=params.dtype, load_format=params.load_format,
                            deterministic=params.deterministic, compiled_step=compiles,
                            free_bytes=free_memory(device), model_implementation=params.model_implementation)
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise InsufficientMemoryError(f"the weights do not fit {device_name(device)}: {first_line(error)}",
                                      f"{free_memory(device):,} bytes are free now",
                                      "use a smaller model or dtype, or free memory") from error

    spec, kv = loaded.spec, params.kv_cache_config
    if compiles_attention and not params.deterministic:           # with `deterministic`, decode attention is not used
        with on_device(device):
            refuse_large_blocks(spec, kv.tokens_per_block, loaded.dtype, device_name(device))
    on_cpu = device.type == "cpu"
    max_seq_len = spec.max_position_embeddings if params.max_seq_len is None else params.max_seq_len
    if max_seq_len > spec.max_position_embeddings:
        raise ConfigError(
            f"max_seq_len is {max_seq_len:,}",
            f"the model has positions for {counted(spec.max_position_embeddings, 'token')}",
            f"set max_seq_len to at most {spec.max_position_embeddings:,} or leave it unset")
    # max_num_tokens does not limit padded calls. A step that does not fit into memory all the same is bisected.
    step_tokens = params.max_batch_size * max_seq_len if layout is packing.padded else params.max_num_tokens
    one_block = block_bytes(spec, kv.tokens_per_block, loaded.dtype)
    windows, sink = effective_windows([layer.window for layer in spec.attention], kv.max_attention_window,
                                      kv.sink_token_length, max_seq_len)
    # Sink tokens exclude block reuse, so there is nothing to evict to the host.
    host_blocks = plan_host_blocks(0 if sink else kv.host_cache_size, block_bytes=one_block,
                                   free_bytes=free_memory(torch.device("cpu")))
    on_triton = use_triton(device)
    processors = num_multiprocessors(device) if on_triton else 0
    set_aside = step_bytes(spec, loaded.dtype, step_tokens, params.max_batch_size * max_beam_width, processors)
    graph_sizes = NO_SIZES
    if not not_captured:                        # graphs keep the memory of their steps
        most_rows = graph_rows(num_slots)[-1]
        if layout is packing.packed:
            graph_sizes = mixed_sizes(num_slots, step_tokens, loaded.weight_bytes // loaded.dtype.itemsize)
        set_aside += step_bytes(spec, loaded.dtype, max([most_rows, *map(sum, graph_sizes)]), most_rows + MOST_CONTEXTS,
                                processors)
    plan = plan_memory(
        kv,
        block_bytes=one_block,
        free_bytes=free_memory(device) - (host_blocks * one_block if on_cpu else 0),
        step_bytes=set_aside,
        on_gpu=not on_cpu,
        max_seq_len=max_seq_len,
        max_num_sequences=None if params.max_num_sequences == -1 else num_slots * max_beam_width)
    log.info("%s model %s, weights of %s bytes on %s; %s", loaded.implementation, spec.architecture,
             f"{loaded.weight_bytes:,}", device_name(device), plan.reason)

    refuse_too_many_slots(num_slots, free_memory(torch.device("cpu")))

    backend = None
    try:
        with torch.inference_mode():
            pool = make_kv_pool(spec, plan.num_blocks, kv.tokens_per_block, loaded.dtype, device)
            host_pool = make_host_pool(spec, host_blocks, kv.tokens_per_block, loaded.dtype, device)
            attention = (attention_factory or make_attention)(
                _with_windows(spec, windows), pool, **({"sink": sink} if sink else {}),
                **({"deterministic": True} if params.deterministic else {}))
        backend = NativeBackend(loaded, attention, pool, layout=layout, num_slots=num_slots, max_seq_len=max_seq_len,
                                max_beam_width=max_beam_width, windows=windows, sink_tokens=sink, host_pool=host_pool,
                                num_threads=params.num_threads, is_engine_thread=is_engine_thread,
                                own_stages=own_stages(num_slots, device) if own_stages else (),
                                graph_sizes=graph_sizes)
        backend.info = dataclasses.replace(backend.info, not_captured=not_captured,
                                           not_compiled=obstacle if on_cpu else "")
        if compiles:
            hold_helpers(backend)                         # helper threads for products, from the warm-up on
        backend.warm_up(max_beam_width)
        backend.fuse_steps(loaded, _with_windows(spec, windows), min(num_slots, params.max_batch_size, step_tokens))
        if not_captured:
            log.info(WITHOUT_GRAPHS, not_captured)
        else:
            backend.capture_graphs(must=params.cuda_graphs is True)
        if compiles:
            backend.compile_step(loaded, _with_windows(spec, windows), must=params.cpu_compile is True)
    except Exception as error:
        if backend is not None:
            backend.close()
        # A factory in Parts that ran out of memory comes as a ConfigError.
        if isinstance(error, ConfigError) and (type(error) is not ConfigError or not is_out_of_memory(error.__cause__)):
            raise
        state = f"{counted(num_slots, 'sequence')} of {counted(max_seq_len, 'token')} and " \
                f"{counted(max_beam_width, 'beam')}"
        if isinstance(error, ConfigError) or is_out_of_memory(error):
            raise InsufficientMemoryError(
                f"no memory is left for a step and the state of {state}: "
                + (error.fact if isinstance(error, ConfigError) else first_line(error)),
                "a step of the largest batch must fit in addition to the weights and the KV cache",
                "lower max_num_sequences, max_batch_size, max_beam_width, KvCacheConfig.free_gpu_memory_fraction or "
                "KvCacheConfig.max_tokens") from error
        raise ConfigError(f"the warm-up of the loaded model, for up to {state}, raised {first_line(error)}",
                          "the model must run a step before it serves requests", "see the exception above") from error
    return backend


def refuse_too_many_slots(num_slots: int, free_bytes: int) -> None:
    """Raise InsufficientMemoryError if the state of `num_slots` sequences alone does not fit into free host memory."""
    if num_slots * SLOT_BYTES > free_bytes:
        raise InsufficientMemoryError(
            f"the state of {counted(num_slots, 'sequence')} takes {counted(num_slots * SLOT_BYTES, 'byte')}",
            f"{free_bytes:,} bytes of host memory are free",
            "lower max_num_sequences, or max_batch_size if max_num_sequences is unset")


def refuse_nondeterministic_parts(device: torch.device, attention_factory: Callable[..., Attention] | None) -> None:
    """Raise ConfigError if the device or a custom attention rules out `deterministic`."""
    if device.type != "cpu" and not use_triton(device):
        raise ConfigError(f"deterministic is True and the device is {device_name(device)}, but triton is not installed",
                          "on a GPU the deterministic matrix products are Triton kernels",
                          "install triton, or use the CPU")
    if attention_factory is not None:
        raise ConfigError("deterministic is True and Parts.attention is set",
                          "only the package's own attention is deterministic", "unset one of the two")


def step_bytes(spec: ModelSpec, dtype: torch.dtype, max_num_tokens: int, max_rows: int, processors: int) -> int:
    """Return an upper estimate of the bytes that a step allocates.

    A step allocates the hidden states, the intermediate results of one layer, and the float32 logits twice.

    max_rows     largest number of rows of logits in a step: one for each sequence, or for each of its beams
    processors   number of multiprocessors of a GPU that runs Triton kernels; 0: no Triton kernels. The kernel
                 that samples needs scratch memory for float32 logits. The kernels of attention need scratch memory for
                 the parts of long sequences
    """
    per_token = 6 * spec.hidden_size + 3 * spec.intermediate_size + 4 * sum(spec.qkv_sizes)
    rows, scratch = min(max_rows, max_num_tokens), 0
    if processors:
        scratch = scratch_bytes(rows, spec.vocab_size, FLOAT32_BYTES) + attention_scratch_bytes(
            rows, spec.num_heads, spec.num_kv_heads, spec.head_size, dtype.itemsize, processors)
    return per_token * dtype.itemsize * max_num_tokens + 2 * FLOAT32_BYTES * spec.vocab_size * rows + scratch


def _with_windows(spec: ModelSpec, windows: Sequence[int | None]) -> ModelSpec:
    return dataclasses.replace(spec, attention=tuple(
        dataclasses.replace(layer, window=window) for layer, window in zip(spec.attention, windows)))


class NativeBackend:
    """The seams.ModelBackend that runs a loaded model.

    pool               the KV cache pool of `attention`
    max_beam_width     largest number of beams of a sequence
    windows            window of each layer in `attention`; None: no window
    sink_tokens        number of sink tokens in `attention`
    host_pool          the host blocks; empty: evicted blocks are not copied to the host
    num_threads        threads of a step on a CPU; None: torch's setting
    own_stages         the user's stages (Parts.stages); see decoding/stages.py
    is_engine_thread   (thread) -> whether the thread runs only the engine, see thread_count.py
    graph_sizes        sizes (generation rows, context tokens) of the steps with contexts that `capture_graphs`
                       captures, see shapes.py
    """

    def __init__(self, loaded: LoadedModel, attention: Attention, pool: torch.Tensor, *, layout: Divide, num_slots: int,
                 max_seq_len: int, max_beam_width: int = 1, windows: Sequence[int | None] = (None,),
                 sink_tokens: int = 0, host_pool: Sequence[torch.Tensor] = (), num_threads: int | None = None,
                 is_engine_thread: Callable[..., bool] = lambda thread: False,
                 own_stages: Sequence[LogitsStage] = (), graph_sizes: frozenset[tuple[int, int]] = NO_SIZES) -> None:
        spec, device = loaded.spec, loaded.device
        num_blocks, tokens_per_block = pool.shape[0], pool.shape[4]
        self.info = BackendInfo(
            vocab_size=spec.vocab_size, max_seq_len=max_seq_len, num_blocks=num_blocks,
            tokens_per_block=tokens_per_block, num_slots=num_slots, dispatch=attention.dispatch,
            hidden_size=spec.hidden_size,
            device=device_name(device), dtype=str(loaded.dtype).removeprefix("torch."),
            attention_window=None if None in windows else max(windows), sink_tokens=sink_tokens,
            host_blocks=len(host_pool), is_asynchronous=device.type != "cpu", copies_blocks=True,
            architecture=spec.architecture, end_ids=loaded.end_ids, model_implementation=loaded.implementation)
        self._device = device
        self._pinned_bytes = sum(block.nbytes for block in host_pool)
        self._host_bytes = 0
        if device.type == "cpu":
            self._host_bytes, self._pinned_bytes = loaded.weight_bytes + pool.nbytes + self._pinned_bytes, 0
        self._layout: Divide | None = layout
        self._operations = Operations(block_operations(pool, host_pool))
        self._pool = pool
        self._uploads, self._readbacks, self._own_stages = Uploads(device), Readbacks(device), tuple(own_stages)
        self._allocated = AllocatedMemory(device)
        # On the default stream, steps and other GPU work of the process would wait for each other.
        self._stream = make_stream(device)
        # Padding rows of plain steps use one extra slot.
        is_plain = layout is not packing.padded and can_bind(attention)
        max_blocks = -(-max_seq_len // tokens_per_block)
        self._tables = BlockTables(num_slots, max_blocks,
                                   copied=(num_slots * max_beam_width, max_blocks) if is_plain else None)
        with on_stream(self._stream), torch.inference_mode():
            self._decoder = GptDecoder(num_slots + is_plain, device, self._own_stages,
                                       deterministic=loaded.deterministic, send=self._uploads.send)
        if loaded.deterministic and num_threads is None:
            num_threads = torch.get_num_threads()               # fixed: the bits may depend on it
        self._num_threads = num_threads
        self._threads = partial(compute_threads, device, num_threads, is_engine_thread)
        self._torch_threads: int | None = None            # threads of torch within a step; None: num_threads
        self._runner: ModelRunner | None = ModelRunner(loaded.model, attention, self._uploads, spec.vocab_size)
        self._parts = DeviceParts(device, self._stream, self._uploads, self._readbacks, pool, host_pool, self._tables,
                                  self._decoder.state, self._decoder, attention,
                                  step_threads(device, num_threads, is_engine_thread), num_slots, spec.vocab_size)
        self._model, self._graph_sizes = loaded.model, graph_sizes
        self._forms: tuple[StepForm, ...] = ()
        if is_plain:
            with on_device(device, self._stream), torch.inference_mode():
                self._inputs = FixedInputs(self._parts, largest_shapes(num_slots, graph_sizes))
            self._forms = self._make_forms(loaded.model)

    def _make_forms(self, model: Model, fused: FusedBody | None = None) -> tuple[StepForm, ...]:
        """Return the forms that launch steps at fixed addresses."""
        table = record_embedding(self._model.embed)
        launches = self._launches = Launches(self._parts, self._inputs, model, table, fused)
        fixed = FixedForm("fixed", self._parts, self._inputs, launches)
        if fused is None:
            return (fixed,)
        return FixedForm("fused", self._parts, self._inputs, launches, fused.most_rows), fixed

    def start(self, batch: ScheduledBatch) -> PendingStep:
        """Launch a step; see seams.ModelBackend.

        After an exception, the same step can be started again. The new run repeats the updates of block tables and
        slots, skips the `batch.operations` that are done, and writes the KV cache entries of the tokens again. Sampled
        tokens are stored last, and by position.
        """
        if batch.generation.num_drafts is not None or batch.context and any(work.num_drafts for work in batch.context):
            raise NotImplementedError("draft tokens are not verified by this backend yet")
        with (on_device(self._device, self._stream), torch.inference_mode(), self._threads(),
              compute_threads(self._device, self._torch_threads)):
            if batch.context or batch.block_table_updates is not NO_UPDATES:
                self._tables.update(batch)
            if batch.operations:
                self._operations.carry_out(batch)
            if batch.context:
                self._decoder.set_up((work.slot, work.setup) for work in batch.context if work.setup is not None)
            if self._forms:
                traits = traits_of(batch, self._parts.slots)
                for form in self._forms:
                    if not (traits & ~form.serves or form.misfit(batch)):
                        return form.start(batch, traits)
            input_tokens = None
            if batch.generation.beam_width > 1:
                input_tokens = self._decoder.searches.input_tokens(batch.generation)
            calls = [self._runner.run(call, self._decoder.state, input_tokens)
                     for call in self._layout(batch, self._tables, self.info.tokens_per_block)]
            return self._sample(batch, calls)

    def memory_usage(self) -> MemoryUsage:
        return MemoryUsage(gpu=self._allocated.num_bytes(), cpu=self._host_bytes,
                           pinned=self._pinned_bytes + self._uploads.pinned_bytes + self._readbacks.pinned_bytes)

    def figures(self) -> dict[str, int]:
        """Return the backend's own statistics.

        They are the number of captured graphs, if there are any, and on a CPU the number of threads of the newest step.
        """
        figures: dict[str, int] = {}
        for form in self._forms:
            figures |= form.figures()
        if self._device.type == "cpu" and self._runner is not None:
            compiled = self._runner.compiled
            figures["Compute Threads"] = (
                compiled.threads if compiled else self._num_threads or torch.get_num_threads())
        return figures

    def close(self) -> None:
        if self._runner is not None:
            finish_stream(self._stream)               # freed memory may be reused at once
            release_helpers(self)
            for form in self._forms:
                form.close()
            self._forms, self._parts, self._inputs, self._launches, self._model = (), None, None, None, None
            self._runner = self._decoder = self._pool = self._layout = self._operations = None
            self._uploads, self._readbacks = Uploads(self._device), Readbacks(self._device)
            self._host_bytes = self._pinned_bytes = 0
            release_memory(self._device)
            self._allocated = AllocatedMemory(self._device)

    def warm_up(self, max_beam_width: int = 1) -> None:
        """Run a context step and a generation step for each of several sequences, all in block 0, then zero the block.

        The sequences are:
            one with all features
            one that is sampled, without other features
            one without features, whose context and generation steps are long enough for attention to split them
            if max_beam_width > 1: one with 2 beams, one with 4, one with 8 and so on, and one with max_beam_width beams

        The steps compile the kernels of all variants of a step, so that no kernel is compiled while requests wait.
        """
        zero = np.zeros(1, np.int32)
        every_parameter = {name: parameter.other for name, parameter in PARAMETERS.items() if name != "beam_width"}
        every_feature = SlotSetup(SamplingConfig(**every_parameter), return_log_probs=True, top_log_probs=1, end_id=0,
                                  bad_words=((0, 0),), stop_words=((0, 0),), prompt_length=1)
        sampled = SlotSetup(SamplingConfig(top_k=2, top_p=0.5, random_seed=0), prompt_length=1)
        # (beams, setup, tokens in the KV cache before the context step and before the generation step)
        sequences = [(1, every_feature, 0, 1), (1, sampled, 0, 1),
                     (1, SlotSetup(prompt_length=1), min(LONG_CONTEXT_TOKENS, self.info.max_seq_len) - 1,
                      self._cached_by_a_long_sequence())]
        # Kernels are compiled for the number of beams rounded up to a power of two.
        for width in [1 << bits for bits in range(1, (max_beam_width - 1).bit_length())] + [max_beam_width]:
            if width > 1:
                beams = SlotSetup(SamplingConfig(beam_width=width), max_new_tokens=2, prompt_length=1)
                sequences.append((width, beams, 0, 1))
        # Set the thread count once for all steps, on the loading thread.
        with (self._threads(), self._naming_stages(),
              self._runner.checking(self.info.hidden_size, self._pool.dtype) as checked):
            if self._forms:
                self._forms = self._make_forms(checked)
            for width, setup, start, num_cached in sequences:
                # All pages of a long sequence are block 0: its values only have to be finite.
                num_pages = max(start, num_cached) // self.info.tokens_per_block + 1
                rows, pages = np.divmod(np.arange(width * num_pages, dtype=np.int32), np.int32(num_pages))
                first = self.start(ScheduledBatch(
                    iteration=0, context=(ContextWork(0, zero, start, True, setup.continuing([0])),),
                    max_beam_width=max_beam_width,
                    block_table_updates=BlockTableUpdates(rows, pages, 0 * rows))).finish()
                if width > 1 and first.failures:      # the model gives no finite logit, so there are no beams
                    continue
                generation = GenerationWork(zero, zero + np.int32(num_cached), width)
                self.start(ScheduledBatch(
                    iteration=1, generation=generation, max_beam_width=max_beam_width,
                    num_padded_rows=2 * (self._layout is packing.padded))).finish()
        if self._forms:
            self._forms = self._make_forms(self._model)
        with on_device(self._device, self._stream), torch.inference_mode():
            clear_block(self._pool, 0)

    def capture_graphs(self, *, must: bool = False) -> None:
        """Capture the launches of steps as graphs, which later steps replay. Call after the warm-up.

        There are no graphs, with a warning, if a capture fails, or if a replayed step has other results than the same
        step launched kernel by kernel.

        must     raise ConfigError instead of the warning
        """
        with on_device(self._device, self._stream), torch.inference_mode():
            try:
                graph = capture(self._parts, self._inputs, self._launches, self._graph_sizes)
                obstacle = self._difference_of_graphs(graph)
            except NoForm as error:
                obstacle = str(error)
        if not obstacle:
            self._forms = (graph, *self._forms)
            return
        if must:
            raise ConfigError(f"cuda_graphs is True, but {obstacle}", "a graph must compute what its kernels compute",
                              "leave cuda_graphs unset to launch kernels one by one")
        self.info = dataclasses.replace(self.info, not_captured=obstacle)
        log.warning(WITHOUT_GRAPHS, obstacle)

    def _difference_of_graphs(self, graph: GraphForm) -> str:
        """Return `difference_of_graphs`, and zero the KV cache."""
        try:
            return difference_of_graphs(
                self.start, graph, graph.with_launches(self._launches.launch), self._parts,
                long_blocks=self._cached_by_a_long_sequence() // self.info.tokens_per_block + 1)
        finally:
            self._pool.zero_()

    def fuse_steps(self, loaded: LoadedModel, spec: ModelSpec, most_rows: int) -> None:
        """Use the form `fused` from now on.

        Call after the warm-up. Has no effect if the device does not run Triton kernels. Logs a message if the model
        cannot be fused, if memory runs out, or if Triton raises an exception.

        spec        the model's spec with the effective windows
        most_rows   number of rows of the largest generation step
        """
        if not self._forms or not use_triton(self._device):
            return
        with on_device(self._device, self._stream), torch.inference_mode():
            try:
                self._forms = self._make_forms(loaded.model, make_fused_body(self._parts, loaded, spec, most_rows))
            except (NotRecordableError, NoForm) as obstacle:
                log.log(logging.WARNING if isinstance(obstacle, NoForm) else logging.INFO,
                        "steps of %s are not fused: %s",
                        type_name(loaded.model), obstacle)
            except Exception as error:
                # Launches one by one need less memory and other kernels. An error of the device is not survived.
                if not is_out_of_memory(error) and not type(error).__module__.startswith("triton"):
                    raise
                log.warning("steps of %s are not fused: %s", type_name(loaded.model), first_line(error))
            finally:
                clear_block(self._pool, 0)

    def _cached_by_a_long_sequence(self) -> int:
        """Return the number of cached tokens of the long sequence in the warm-up.

        If max_seq_len is large enough, attention splits a sequence of this length into parts. If max_seq_len is
        larger than one block, the number is a multiple of tokens_per_block. The next token is then the first token
        of a block. The window of such a token spans the largest possible number of blocks.
        """
        tokens_per_block = self.info.tokens_per_block
        num_blocks = min(LONG_SEQUENCE_BLOCKS, -(-self.info.max_seq_len // tokens_per_block))
        return max((num_blocks - 1) * tokens_per_block, 1)

    def compile_step(self, loaded: LoadedModel, spec: ModelSpec, *, must: bool = False) -> None:
        """Run the model's forward as compiled code from now on, if the model can be compiled.

        spec   the model's spec with the effective windows
        must   whether to raise ConfigError if the model cannot be compiled; otherwise a message is logged
        """
        try:
            with self._threads():
                threads = self._num_threads or torch.get_num_threads()
                self._runner.compiled = compile_step(loaded, spec, self._runner.attention, self._pool,
                                                     self.info.sink_tokens, threads)
            log.info("steps run as compiled code on at most %d threads; torch runs the rest of a step", threads)
            if self._layout is not packing.padded:       # padded calls run in torch
                self.info = dataclasses.replace(self.info, dispatch="compiled")
                if has_openmp():
                    # The rest is little work, and idle threads of torch would spin on the cores of the compiled step.
                    self._torch_threads = 1
        except NotRecordableError as obstacle:
            if must:
                raise ConfigError(f"cpu_compile is True, but {type_name(loaded.model)} cannot be compiled: "
                                  f"{obstacle}", "compiled steps need a model built from batch_manager.layers",
                                  "leave cpu_compile unset to run steps in torch") from obstacle
            reason = f"{type_name(loaded.model)} cannot be compiled: {obstacle}"
            log.info("steps run in torch: %s", reason)
            self.info = dataclasses.replace(self.info, not_compiled=reason)
        finally:
            with torch.inference_mode():
                clear_block(self._pool, 0)

    @contextmanager
    def _naming_stages(self) -> Iterator[None]:
        """Context manager: turn an exception of a custom stage into a ConfigError that names the stage.

        Out-of-memory exceptions stay unchanged.
        """
        try:
            yield
        except Exception as error:
            stage = self._decoder.stages.raised_last
            if not any(stage is own for own in self._own_stages) or is_out_of_memory(error):
                raise
            raise ConfigError(
                f"the stage {type_name(stage)} of Parts.stages raised {first_line(error)} in the warm-up",
                "a stage must accept the warm-up's dummy sequence, of request id 0 and prompt [0]",
                "let the stage accept unknown request ids, and see the exception above") from error

    def _sample(self, batch: ScheduledBatch, calls: list[CallResult]) -> "NativeStep":
        """Compute logits from the hidden states of `calls`, sample tokens, and start copying the tokens to the host."""
        first = calls[0]                                          # has the contexts, in every layout
        rows, hidden = first.rows, first.hidden
        if len(calls) > 1:
            rows, hidden = join_rows([call.rows for call in calls]), torch.cat([call.hidden for call in calls])
        sampled, tensors = None, {}
        if batch.context:
            tensors["context_finite"] = first.context_finite
        if len(rows.slots):
            largest = self._runner.largest(hidden) if self._decoder.needs_only_largest(rows) else None
            if largest is None:
                sampled = self._decoder.sample(self._runner.logits(hidden), rows)
            else:
                sampled = self._decoder.sample_largest(*largest, rows)
            tensors |= sampled.tensors()
        readback = self._readbacks.start(tensors)
        if sampled is not None:
            self._decoder.keep(sampled)
        return NativeStep(batch, self.info.vocab_size, sampled, readback, first.context_logits)


class NativeStep:
    """A launched step other than the plain steps that inputs.py defines.

    sampled   the result of sampling; None: no token is sampled
    """

    def __init__(self, batch: ScheduledBatch, vocab_size: int, sampled: SampledStep | None, readback: Readback,
                 context_logits: dict[int, np.ndarray]) -> None:
        self._batch, self._vocab_size = batch, vocab_size
        self._sampled, self._readback, self._context_logits = sampled, readback, context_logits

    def finish(self) -> StepOutput:
        arrays = self._readback.wait()
        failures = {}
        if self._batch.context and not arrays["context_finite"].all():
            failures = dict.fromkeys(slots_not_finite(self._batch.context, arrays["context_finite"]), UNUSABLE)
        if self._sampled is None:
            none = np.empty(0, np.int32)
            return StepOutput(self._batch.micro_batch_id, none, none, np.empty(0, np.uint8),
                              context_logits=self._context_logits, failures=failures)
        return StepOutput(self._batch.micro_batch_id, **self._sampled.output(arrays, failures, self._vocab_size),
                          context_logits=self._context_logits)
