"""The features of the matrix: what each needs of an engine and of a request, how it shows, and a bug of it to plant.

This is the only place that describes a feature. A new feature gets a class here and its column in pairs.py.
"""

import re
from random import Random
from typing import TYPE_CHECKING, Any

from batch_manager import ContextChunkingPolicy, FinishReason, SchedulerPolicy, SpeculativeConfig, TrtGptModelType

if TYPE_CHECKING:
    from .engines import Run
    from .world import Ask, World


class Feature:
    """One row and one column of the matrix.

    letter, name, page    for the document; `page` is a file of docs/, with the anchor of a section
    defines_output        whether the feature belongs to what a request asks for, so that the reference has it too
    needs_model           whether the scripted model cannot run it
    models                the small models with which its pairs run; empty: all
    scripted_with         letters of the features with which its pairs run with the scripted model alone
    """

    letter = name = page = scripted_with = ""
    defines_output = needs_model = False
    models: tuple[str, ...] = ()

    def engine(self, world: "World", draw: Random) -> None:
        """Set the options of the engine."""

    def request(self, ask: "Ask", world: "World", draw: Random) -> None:
        """Make a request use the feature."""

    def proof(self, run: "Run") -> set[int]:
        """Return the ids of the requests for which the feature took effect."""
        raise NotImplementedError

    def plant(self, patch: Any) -> None:
        """Patch a bug of the feature into the engine. `patch` is pytest's monkeypatch.

        The bug of a feature that defines the output must show beside other requests, because the reference has it too.
        """
        raise NotImplementedError


class ChunkedContext(Feature):
    letter, name, page = "C", "chunked context", "batching.md"

    def engine(self, world: "World", draw: Random) -> None:
        world.options["enable_chunked_context"] = True
        world.options["context_chunking_policy"] = draw.choice(list(ContextChunkingPolicy))
        world.most_tokens = world.least_tokens + draw.choice([1, 2]) * world.block

    def request(self, ask: "Ask", world: "World", draw: Random) -> None:
        ask.prompt_length = max(ask.prompt_length, (world.most_tokens or 8) + world.block + draw.randint(1, 12))

    def proof(self, run: "Run") -> set[int]:
        return {request_id for request_id, start, _, end_before in run.chunks() if 0 < start == end_before}

    def plant(self, patch: Any) -> None:
        """A later chunk has its tokens in the wrong order."""
        from dataclasses import replace

        from batch_manager.steps.resources import Resources

        context_work = Resources._context_work

        def shifted(self: Resources, request: Any, size: int) -> Any:
            work = context_work(self, request, size)
            return work if work.setup is not None else replace(work, token_ids=work.token_ids[::-1].copy())
        patch.setattr(Resources, "_context_work", shifted)


class BlockReuse(Feature):
    letter, name, page = "R", "block reuse", "kv-cache.md#block-reuse"

    def engine(self, world: "World", draw: Random) -> None:
        world.kv["enable_block_reuse"] = True
        world.kv["enable_partial_reuse"] = draw.random() < 0.7
        world.host_blocks = draw.choice([0, 0, 6])

    def request(self, ask: "Ask", world: "World", draw: Random) -> None:
        ask.trunk = world.block + draw.choice([1, world.block, world.block + 1])
        ask.prompt_length = max(ask.prompt_length, ask.trunk + draw.choice([1, 1, 5]))

    def proof(self, run: "Run") -> set[int]:
        return {request_id for request_id, start, _, end_before in run.chunks() if start > 0 and start != end_before}

    def plant(self, patch: Any) -> None:
        """A prompt reuses one token more than it has in common with a cached block."""
        from batch_manager.kv.prefix_index import PrefixNode

        similar = PrefixNode.most_similar_child

        def one_more(self: PrefixNode, tokens: Any, extra_ids: Any) -> Any:
            node, count = similar(self, tokens, extra_ids)
            return node, count + (node is not None and count < len(tokens))
        patch.setattr(PrefixNode, "most_similar_child", one_more)


class Pause(Feature):
    letter, name, page = "P", "pause", "batching.md"

    def engine(self, world: "World", draw: Random) -> None:
        world.options["policy"] = SchedulerPolicy.MAX_UTILIZATION
        world.is_tight = True

    def request(self, ask: "Ask", world: "World", draw: Random) -> None:
        ask.count, ask.is_long = max(ask.count, world.block + draw.randint(6, 14)), draw.random() < 0.8

    def proof(self, run: "Run") -> set[int]:
        return {request_id for iteration in run.trace for request_id in iteration.paused}

    def plant(self, patch: Any) -> None:
        """A paused request comes back with a wrong last token."""
        from batch_manager.requests.llm_request import LlmRequest

        pause = LlmRequest.pause

        def forgetful(self: LlmRequest, *given: int) -> None:
            for tokens in self.tokens:
                tokens[-1] = tokens[0]
            pause(self, *given)
        patch.setattr(LlmRequest, "pause", forgetful)


class Window(Feature):
    letter, name, page = "W", "attention window", "kv-cache.md#windows-and-sinks"
    defines_output = True
    sinks = (0,)

    def engine(self, world: "World", draw: Random) -> None:
        world.kv["max_attention_window"] = world.kv.get("max_attention_window") or draw.randint(world.block + 1, 20)
        world.kv["sink_token_length"] = world.kv.get("sink_token_length") or draw.choice(self.sinks)

    def request(self, ask: "Ask", world: "World", draw: Random) -> None:
        seen = world.kv["max_attention_window"] + world.kv["sink_token_length"]
        ask.count = max(ask.count, 8)
        ask.prompt_length = max(ask.prompt_length, seen + world.block + 2 - ask.count + draw.randint(0, 4))

    def proof(self, run: "Run") -> set[int]:
        """The last token of these requests does not see the whole sequence, so that a block left the window."""
        kv = run.world.kv
        seen = kv["max_attention_window"] + kv["sink_token_length"] + run.world.block
        return {ask.id for ask in run.world.asks if len(ask.prompt) + run.num_tokens(ask.id) > seen
                and kv["sink_token_length"] >= self.sinks[0]}

    def plant(self, patch: Any) -> None:
        """A block leaves the window a block too early."""
        from batch_manager.kv.window import AttentionWindow

        unseen = AttentionWindow.num_unseen
        patch.setattr(AttentionWindow, "num_unseen", lambda self, length: unseen(self, length + self.tokens_per_block))


class Sinks(Window):
    letter, name = "N", "sinks"
    sinks = (1, 3, 5)

    def plant(self, patch: Any) -> None:
        """The blocks of the first tokens leave the window with the others."""
        from batch_manager.kv.window import AttentionWindow

        patch.setattr(AttentionWindow, "sink_blocks", property(lambda self: 0))


class Beams(Feature):
    letter, name, page = "B", "beams", "requests.md#beam-search"
    defines_output = True

    def engine(self, world: "World", draw: Random) -> None:
        world.options["max_beam_width"] = 3

    def request(self, ask: "Ask", world: "World", draw: Random) -> None:
        ask.tensors |= {"beam_width": 2 if "V" in world.letters else draw.choice([2, 3]),
                        "len_penalty": draw.choice([0.0, 0.7]), "early_stopping": draw.randrange(3)}

    def proof(self, run: "Run") -> set[int]:
        return {ask.id for ask in run.world.asks if len({tuple(beam) for beam in run.beams(ask.id)}) > 1}

    def plant(self, patch: Any) -> None:
        """The searches of a step get the newest tokens of each other."""
        from batch_manager.decoding.beam_search import BeamSearches
        from batch_manager.handover import GenerationWork

        input_tokens = BeamSearches.input_tokens
        patch.setattr(BeamSearches, "input_tokens", lambda self, work: input_tokens(
            self, GenerationWork(work.slots[::-1], work.kv_lengths[::-1], work.beam_width)))


class RunAhead(Feature):
    letter, name, page = "A", "run-ahead", "batching.md#run-ahead"

    def engine(self, world: "World", draw: Random) -> None:
        world.options["run_ahead"] = True

    def proof(self, run: "Run") -> set[int]:
        """The requests that generated in an iteration after which a step was in flight, those in lockstep included."""
        return {request_id for iteration in run.trace if iteration.iteration in run.ahead
                for request_id in (*iteration.generation, *(chunk[0] for chunk in iteration.context))}

    def plant(self, patch: Any) -> None:
        """The tokens of rows whose requests have ended are appended to them."""
        from batch_manager.loop import advance

        patch.setattr(advance, "COMPLETE", object())


class StaticBatching(Feature):
    letter, name, page = "V", "V1", "batching.md#v1"

    def engine(self, world: "World", draw: Random) -> None:
        world.options["model_type"] = TrtGptModelType.V1

    def proof(self, run: "Run") -> set[int]:
        """The members of batches of several requests."""
        return {chunk[0] for iteration in run.trace for chunk in iteration.context if len(iteration.context) > 1
                } if any("Empty Generation Slots" in record for record in run.records) else set()

    def plant(self, patch: Any) -> None:
        """The finals that a batch held back have the reason of its longest member."""
        from batch_manager.loop.batch_scheme import HeldFinals

        end = HeldFinals.end
        patch.setattr(HeldFinals, "end", lambda self, request, reason: end(
            self, request, FinishReason.LENGTH if reason.is_natural else reason))


class Grammar(Feature):
    letter, name, page = "G", "grammar", "requests.md#logits-of-your-own"
    defines_output = needs_model = True
    patterns = ("(yes|no)[a-z]{2,8}!", "[0-9]{2,9}(,[0-9]{1,3}){0,2}", "[A-C]([a-z]x){1,6}")
    long_patterns = ("[a-f]{22,30}!", "[0-9]([A-Z][0-9]){10,14}")

    def request(self, ask: "Ask", world: "World", draw: Random) -> None:
        is_long = "P" in ask.has             # a short output ends before the pool is full
        ask.pattern = draw.choice(self.long_patterns if is_long else self.patterns)
        ask.count, ask.is_batched = max(ask.count, 32 if is_long else 18), draw.random() < 0.6

    def proof(self, run: "Run") -> set[int]:
        return {ask.id for ask in run.world.asks if ask.pattern
                and re.fullmatch(ask.pattern, run.text(ask.id))}

    def plant(self, patch: Any) -> None:
        """The grammar is one token behind."""
        from batch_manager.extras import guided_decoding

        catch_up = guided_decoding._catch_up

        def behind(session: Any, tokens: list[int]) -> None:
            catch_up(session, tokens if session.prompt_length is None else tokens[:-1])
        patch.setattr(guided_decoding, "_catch_up", behind)


class Adapter(Feature):
    letter, name, page = "L", "LoRA adapter", "adapters.md"
    defines_output = True
    ranks = {1: 1, 2: 3, 3: 2}                          # task id -> rank; the engine has the adapters from the start

    def engine(self, world: "World", draw: Random) -> None:
        from batch_manager import PeftCacheConfig

        world.adapter_pages = draw.choice([3, 4, 6])
        world.options["peft_cache_config"] = PeftCacheConfig(max_adapter_size=3)

    def request(self, ask: "Ask", world: "World", draw: Random) -> None:
        ask.tensors["lora_task_id"] = draw.choice([1, 2, 2, 3])

    def proof(self, run: "Run") -> set[int]:
        loads = run.records[-1]["LoRA Loads"]
        return {ask.id for ask in run.world.asks if loads and "lora_task_id" in ask.tensors and run.num_tokens(ask.id)}

    def plant(self, patch: Any) -> None:
        """Every sequence gets the pages of the first request that has an adapter."""
        from batch_manager.kv.peft_cache_manager import PeftCacheManager

        set_up = PeftCacheManager.set_up
        patch.setattr(PeftCacheManager, "set_up", lambda self, request, setup: set_up(
            self, next(iter(self._holders), request), setup))


class TensorParallel(Feature):
    letter, name, page = "T", "tensor parallel", "ranks.md"
    needs_model, models = True, ("llama",)

    def engine(self, world: "World", draw: Random) -> None:
        world.tensor_size = 2

    def proof(self, run: "Run") -> set[int]:
        """All requests, if other ranks computed with rank 0."""
        is_split = all(record["Tensor Parallel Size"] == 2 for record in run.records)
        return {ask.id for ask in run.world.asks} if is_split else set()

    def plant(self, patch: Any) -> None:
        """The terms of a sum are too small."""
        from batch_manager.runtime.ranks.exchange import Exchange

        total = Exchange.sum
        patch.setattr(Exchange, "sum", lambda self, x: total(self, x).mul_(0.5))


class PipelineParallel(TensorParallel):
    letter, name = "Y", "pipeline stages"

    def engine(self, world: "World", draw: Random) -> None:
        world.num_stages = 2

    def proof(self, run: "Run") -> set[int]:
        is_split = all(record["Pipeline Parallel Size"] == 2 for record in run.records)
        return {ask.id for ask in run.world.asks} if is_split else set()

    def plant(self, patch: Any) -> None:
        """Hidden states arrive in another order of rows."""
        from batch_manager.runtime.ranks.exchange import Exchange

        receive = Exchange.receive
        patch.setattr(Exchange, "receive", lambda self, num_rows: receive(self, num_rows).flip(0))


class LoadedPrompts(Feature):
    """Blocks of prompts come from elsewhere. The blocks of the scripted model show as well whether the right ones came,
    so that features of scheduling are paired there.
    """

    models, scripted_with = ("llama",), "CRPWNAV"

    def request(self, ask: "Ask", world: "World", draw: Random) -> None:
        ask.prompt_length = max(ask.prompt_length, draw.choice([1, 2, 3]) * world.block + draw.choice([1, 3]))

    def proof(self, run: "Run") -> set[int]:
        """The requests that waited for blocks of the other place, and began after them."""
        begun_later = {request_id for request_id, start, _, end_before in run.chunks() if start > end_before == 0}
        return run.loaded & begun_later


class DiskCache(LoadedPrompts):
    """Before the requests run, another engine has saved their prompts in the directory."""

    letter, name, page = "K", "disk cache", "kv-cache.md#a-prompt-cache-on-disk"

    def engine(self, world: "World", draw: Random) -> None:
        world.kv |= {"enable_block_reuse": True, "disk_min_tokens": world.block}
        world.host_blocks = max(world.host_blocks, draw.choice([12, 24]))
        world.has_disk = True

    def plant(self, patch: Any) -> None:
        """The contents of a load are in the wrong order."""
        from batch_manager.stores.directory import DirectoryStore

        load = DirectoryStore.load
        patch.setattr(DirectoryStore, "load", lambda self, blocks, buffers: load(self, blocks, buffers[::-1]))


class Speculation(Feature):
    """Drafts of a drafter that knows the texts of the requests alone, and is right as often as the world wants."""

    letter, name, page = "S", "drafts", "batching.md#speculation"

    def engine(self, world: "World", draw: Random) -> None:
        world.options["speculative_config"] = SpeculativeConfig("custom", draw.choice([2, 3, 7]))
        world.right = draw.choice([0.7, 0.95])

    def request(self, ask: "Ask", world: "World", draw: Random) -> None:
        ask.count, ask.is_long = max(ask.count, 12), draw.random() < 0.7
        if "P" in ask.has:                   # drafts make outputs so fast that few would be paused
            ask.count, ask.is_long = 2 * ask.count, True

    def proof(self, run: "Run") -> set[int]:
        return run.drafter.accepted & {ask.id for ask in run.world.asks if ask.options.get("speculation", True)}

    def plant(self, patch: Any) -> None:
        """Rejected drafts keep their places in the cache."""
        from batch_manager.loop import advance

        patch.setattr(advance, "_reject_drafts", lambda *given: None)


class Disaggregation(LoadedPrompts):
    """Another engine has computed the prompts, and hands their blocks over."""

    letter, name, page = "D", "prompts from another engine", "kv-cache.md#prompts-computed-in-another-engine"

    def engine(self, world: "World", draw: Random) -> None:
        world.kv |= {"enable_block_reuse": True}
        world.host_blocks = max(world.host_blocks, draw.choice([12, 24, 60]))
        world.has_contexts = True

    def plant(self, patch: Any) -> None:
        """The engine that computes prompts sends the contents of other host blocks."""
        from batch_manager.stores.handed_blocks import HandedBlocks

        answer = HandedBlocks._answer

        def mixed(self: Any, *arguments: Any) -> str:
            host_block, num_blocks = self._host_block, self._cache.host.num_blocks
            self._host_block = lambda host_id: host_block(num_blocks - 1 - host_id)
            try:
                return answer(self, *arguments)
            finally:
                self._host_block = host_block
        patch.setattr(HandedBlocks, "_answer", mixed)


class QuantisedWeights(Feature):
    letter, name, page = "Q", "quantised weights", "models.md#quantising-while-loading"
    defines_output = needs_model = True
    models = ("llama",)

    def engine(self, world: "World", draw: Random) -> None:
        world.options["quantization"] = draw.choice(["int8", "int4"])
        world.block = 16                                # compiled steps, whose products alone read quantised weights

    def proof(self, run: "Run") -> set[int]:
        """All requests, if no step left compiled code. In V1, a step without padding is computed in it."""
        forms = {name for record in run.records for name in ("Compiled Steps", "Padded Steps", "Packed Steps")
                 if record.get(name)}
        return {ask.id for ask in run.world.asks} if forms and "Packed Steps" not in forms else set()

    def plant(self, patch: Any) -> None:
        """Every second engine quantises its weights in the other way."""
        from batch_manager.layers import linear

        quantised, seen, other = linear.quantised, [], {"int8": "int4", "int4": "int8"}

        def in_turns(stored: Any, quantization: str, weights: Any) -> Any:
            if weights not in seen:
                seen.append(weights)
            return quantised(stored, other[quantization] if len(seen) % 2 else quantization, weights)
        patch.setattr(linear, "quantised", in_turns)


class Fp8Cache(Feature):
    """With `deterministic`, because rounding makes a large difference of a small one."""

    letter, name, page = "F", "FP8 cache", "kv-cache.md#keys-and-values-in-fp8"
    defines_output = needs_model = True
    models = ("llama",)

    def engine(self, world: "World", draw: Random) -> None:
        world.kv["kv_cache_dtype"] = "fp8_e4m3"
        world.options["deterministic"] = True

    def proof(self, run: "Run") -> set[int]:
        return {ask.id for ask in run.world.asks} if run.kv_cache_dtype == "fp8_e4m3" else set()

    def plant(self, patch: Any) -> None:
        """Every second engine does not round keys and values."""
        from batch_manager.runtime import build_backend

        dtype_of, made = build_backend.pool_dtype, []

        def in_turns(kind: str, dtype: Any) -> Any:
            made.append(kind)
            return dtype_of("auto" if len(made) % 2 else kind, dtype)
        patch.setattr(build_backend, "pool_dtype", in_turns)


FEATURES: dict[str, Feature] = {feature.letter: feature for feature in (
    ChunkedContext(), BlockReuse(), Pause(), Window(), Sinks(), Beams(), Grammar(), RunAhead(), Adapter(),
    StaticBatching(), TensorParallel(), PipelineParallel(), DiskCache(), Speculation(), Disaggregation(),
    QuantisedWeights(), Fp8Cache())}
