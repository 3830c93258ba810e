"""Compares a request's tokens, log-probabilities and logits, bit by bit, between a run alone and another run.

The tests of this folder and tests/campaigns/deterministic.py use this module. A request that runs alone computes its
whole context in one step, is never paused and reuses no cached block. In the other run, it shares the engine with other
requests, and has other `Circumstances`, such as chunks and pauses. A *pair* is the two outcomes of one request.
"""

import json
import random
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from batch_manager import (
    InferenceRequest,
    KvCacheConfig,
    RequestScheduler,
    SpeculativeConfig,
    TrtGptModelOptionalParams,
    TrtGptModelType,
    resume,
)
from batch_manager.clock import SystemClock
from batch_manager.layers.context import LayerContext
from batch_manager.models.registry import find_model
from batch_manager.responses.tensors import TOP_TENSORS
from batch_manager.runtime import packing
from batch_manager.runtime.build_backend import build_native_backend
from batch_manager.runtime.device.running import CapturedGraph
from batch_manager.scheduling.interfaces import SchedulerOutput
from batch_manager.weights.json_file import Fields
from batch_manager.weights.source import DummyWeights
from tests.harness.client import ArrivingClient
from tests.harness.drafters import KnowingDrafter
from tests.harness.world import make_loop

VOCAB, MOST_DRAFTS = 211, 5
SHIPPED = Path(__file__).parents[2] / "examples" / "models" / "austen-4m"
LAYOUTS = {"fused": packing.packed, "split": packing.split, "padded": packing.padded}

# The configurations have widths that are no multiple of a vector, groups of one, two, three and four heads, and a long
# inner sum, for which the product of a single row differs from that of several rows.
CONFIGS = {
    "gpt2": {"architectures": ["GPT2LMHeadModel"], "vocab_size": VOCAB, "n_embd": 60, "n_layer": 2, "n_head": 4,
             "n_inner": 1604, "n_positions": 512},
    "llama": {"architectures": ["LlamaForCausalLM"], "num_attention_heads": 6, "num_key_value_heads": 2,
              "hidden_size": 96, "intermediate_size": 100},
    "mistral": {"architectures": ["MistralForCausalLM"], "num_attention_heads": 4, "num_key_value_heads": 4,
                "hidden_size": 96, "intermediate_size": 130, "sliding_window": 20},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "num_attention_heads": 4, "num_key_value_heads": 1,
              "hidden_size": 64, "intermediate_size": 1600, "tie_word_embeddings": True},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "num_attention_heads": 4, "num_key_value_heads": 2,
              "hidden_size": 64, "head_dim": 32, "intermediate_size": 112},
    "gemma3": {"architectures": ["Gemma3ForCausalLM"], "num_attention_heads": 4, "num_key_value_heads": 2,
               "hidden_size": 64, "head_dim": 32, "intermediate_size": 100, "sliding_window": 20,
               "sliding_window_pattern": 2, "query_pre_attn_scalar": 24, "final_logit_softcapping": 4.0,
               "hidden_activation": "gelu_pytorch_tanh"},
}
CONFIGS |= {
    "gpt_neox": {"architectures": ["GPTNeoXForCausalLM"], "num_attention_heads": 4, "hidden_size": 64,
                 "intermediate_size": 100, "hidden_act": "gelu"},
    "olmo2": {"architectures": ["Olmo2ForCausalLM"], "num_attention_heads": 4, "num_key_value_heads": 2,
              "hidden_size": 64, "intermediate_size": 100},
    "stablelm": {"architectures": ["StableLmForCausalLM"], "num_attention_heads": 4, "num_key_value_heads": 2,
                 "hidden_size": 64, "intermediate_size": 100, "qk_layernorm": True},
    "opt": {"architectures": ["OPTForCausalLM"], "num_attention_heads": 4, "hidden_size": 64, "ffn_dim": 100,
            "word_embed_proj_dim": 40},
    "bloom": {"architectures": ["BloomForCausalLM"], "num_attention_heads": 6, "hidden_size": 96},
    "falcon": {"architectures": ["FalconForCausalLM"], "num_attention_heads": 6, "hidden_size": 96, "alibi": True,
               "new_decoder_architecture": True, "num_kv_heads": 2},
}
_SMALL = {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 64, "intermediate_size": 100}
_EXPERTS = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 44}
CONFIGS |= {
    "gptj": {"architectures": ["GPTJForCausalLM"], "vocab_size": VOCAB, "n_embd": 64, "n_layer": 2, "n_head": 4,
             "n_inner": 100, "n_positions": 512, "rotary_dim": 6},
    "gemma": {**_SMALL, "architectures": ["GemmaForCausalLM"], "head_dim": 24, "hidden_act": "gelu_pytorch_tanh"},
    "gemma2": {**_SMALL, "architectures": ["Gemma2ForCausalLM"], "head_dim": 32, "sliding_window": 20,
               "query_pre_attn_scalar": 20, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0,
               "hidden_activation": "gelu_pytorch_tanh"},
    "phi": {**_SMALL, "architectures": ["PhiForCausalLM"], "hidden_act": "gelu_new"},
    "phi3": {**_SMALL, "architectures": ["Phi3ForCausalLM"], "pad_token_id": 0, "partial_rotary_factor": 0.5,
             "sliding_window": 40},
    "cohere": {**_SMALL, "architectures": ["CohereForCausalLM"], "logit_scale": 0.3, "use_qk_norm": True},
    "cohere2": {**_SMALL, "architectures": ["Cohere2ForCausalLM"], "logit_scale": 0.5, "sliding_window": 20,
                "sliding_window_pattern": 2},
    "granite": {**_SMALL, "architectures": ["GraniteForCausalLM"], "embedding_multiplier": 3.0,
                "residual_multiplier": 0.3, "attention_multiplier": 0.4, "logits_scaling": 0.5},
    "olmo3": {**_SMALL, "architectures": ["Olmo3ForCausalLM"], "sliding_window": 20,
              "layer_types": ["sliding_attention", "full_attention"]},
    "smollm3": {**_SMALL, "architectures": ["SmolLM3ForCausalLM"], "pad_token_id": 0, "no_rope_layer_interval": 2},
    "starcoder2": {**_SMALL, "architectures": ["Starcoder2ForCausalLM"], "hidden_act": "gelu_pytorch_tanh"},
    "mixtral": {**_SMALL, "architectures": ["MixtralForCausalLM"], "num_local_experts": 5, "sliding_window": 20},
    "qwen2_moe": {**_SMALL, **_EXPERTS, "architectures": ["Qwen2MoeForCausalLM"], "norm_topk_prob": True,
                  "shared_expert_intermediate_size": 52},
    "qwen3_moe": {**_SMALL, **_EXPERTS, "architectures": ["Qwen3MoeForCausalLM"], "head_dim": 32,
                  "decoder_sparse_step": 2},
    "olmoe": {**_SMALL, "architectures": ["OlmoeForCausalLM"], "num_experts": 6, "num_experts_per_tok": 3,
              "clip_qkv": 0.8},
    "granite_moe": {**_SMALL, "architectures": ["GraniteMoeForCausalLM"], "num_local_experts": 5,
                    "embedding_multiplier": 3.0, "residual_multiplier": 0.3, "attention_multiplier": 0.4,
                    "logits_scaling": 0.5},
}
DECODER = {"vocab_size": VOCAB, "num_hidden_layers": 2, "max_position_embeddings": 512, "hidden_act": "silu",
           "rms_norm_eps": 1e-5, "tie_word_embeddings": False}
FAMILIES = [*CONFIGS, "austen-4m"]


class _RecordedWeights(DummyWeights):
    """Generates random weights, large enough that every part of a model affects the result.

    tensors   name -> the weight that was generated
    """

    def __init__(self) -> None:
        super().__init__(0, torch.device("cpu"), torch.float32)
        self.tensors = {}

    def _fill(self, name: str, rows: torch.Tensor) -> None:
        super()._fill(name + ".weight", rows) if rows.dim() > 1 else rows.normal_(0.0, 0.2)
        if rows.dim() > 1:
            rows.mul_(1.5 / 0.02 / rows.shape[-1]**0.5)
        elif not name.endswith("bias"):
            rows.add_(1.0)
        self.tensors[name] = rows.clone()


def make_checkpoint(family: str, parent: Path) -> Path:
    """Write a checkpoint of a small model of the family, with random weights, below `parent`. Return its folder.

    For "austen-4m", nothing is written. The result is the folder of the shipped model.
    """
    if family == "austen-4m":
        return SHIPPED
    folder = parent / family
    if not folder.exists():
        config = CONFIGS[family] if "n_embd" in CONFIGS[family] else {**DECODER, **CONFIGS[family]}
        architecture = config["architectures"][0]
        model_class, weights = find_model(architecture), _RecordedWeights()
        torch.manual_seed(0)
        context = LayerContext(device=torch.device("cpu"), dtype=torch.float32)
        model_class(model_class.read_spec(Fields(config, "config.json"), architecture), weights, context)
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
        save_file(weights.tensors, folder / "model.safetensors")
    return folder


@dataclass(frozen=True)
class Ask:
    """A request without an id: prompt, number of output tokens, sampling parameters and options."""

    prompt: tuple[int, ...]
    count: int
    sampling: tuple[tuple[str, float], ...] = ()
    context_logits: bool = True
    beam_width: int = 1

    def request(self, request_id: int) -> InferenceRequest:
        return InferenceRequest(request_id, {
            **({"beam_width": self.beam_width} if self.beam_width > 1 else {}),
            "input_ids": list(self.prompt), "request_output_len": self.count, "return_log_probs": True,
            "return_context_logits": self.context_logits, "return_generation_logits": True, **dict(self.sampling)})


@dataclass(frozen=True)
class Outcome:
    tokens: tuple[int, ...]
    log_probs: bytes
    generation_logits: bytes
    context_logits: bytes
    beams: bytes

    def differences(self, other: "Outcome") -> list[str]:
        return [name for name, value in vars(self).items() if value != vars(other)[name]]

    def after(self, count: int) -> "Outcome":
        """Return what a request has that continues after the first `count` tokens; the fields of beams are empty."""
        skipped = [len(values) // len(self.tokens) * count for values in (self.log_probs, self.generation_logits)]
        return Outcome(self.tokens[count:], self.log_probs[skipped[0]:], self.generation_logits[skipped[1]:], b"", b"")


@dataclass
class Circumstances:
    """How a run schedules its requests. None of it must change any output.

    chunk      tokens of each chunk except the last; None: whole contexts; 0: a random number of blocks
    pauses     request id -> numbers of generated tokens after which the request is paused
    layout     key of LAYOUTS: how a step packs its tokens
    overlap    set enable_trt_overlap, and run about half of the requests in each step
    static     use TrtGptModelType.V1 with its own scheduler
    arrivals   request id -> iteration in which the get callback returns the request; 0 if the id is missing
    laziness   probability that the scheduler leaves a runnable request out of a step
    solitary   each step runs a single request
    reuse      enable block reuse
    drafts     probability that a draft token of the client or the engine is right; None: there are no drafts
    resumed    request id -> number of tokens of the run alone after which the request is resumed in this engine
    """

    layout: str = "fused"
    overlap: bool = False
    static: bool = False
    chunk: int | None = None
    pauses: dict[int, set[int]] = field(default_factory=dict)
    arrivals: dict[int, int] = field(default_factory=dict)
    laziness: float = 0.0
    solitary: bool = False
    reuse: bool = False
    drafts: float | None = None
    resumed: dict[int, int] = field(default_factory=dict)
    seed: int = 0


class ScriptedScheduler(RequestScheduler):
    """Chooses, chunks and pauses requests as the circumstances say. The pool must have blocks for all requests.

    reused   request id -> largest number of prompt tokens that the request reused from the cache
    """

    def __init__(self, circumstances: Circumstances, limits, kv_cache_manager) -> None:
        self.circumstances, self.limits, self.kv = circumstances, limits, kv_cache_manager
        self.reused: dict[int, int] = {}
        self.random = random.Random(circumstances.seed)
        self.pauses = {request_id: set(at) for request_id, at in circumstances.pauses.items()}
        self.num_pauses = 0

    def schedule_request(self, active_requests, inflight_request_ids) -> SchedulerOutput:
        for request in active_requests:
            found = max(self.kv.reused_tokens(request), self.reused.get(request.request_id, 0))
            self.reused[request.request_id] = found
        ready = [request for request in active_requests if request.request_id not in inflight_request_ids]
        paused = []
        for request in ready:
            left = self.pauses.get(request.request_id, set())
            if request.is_generating and request.total_generated_tokens in left and (
                    len(ready) - len(paused) > 1 or inflight_request_ids):
                left.discard(request.total_generated_tokens)
                paused.append(request)
        runnable = [request for request in ready if request not in paused]
        chosen = [request for request in runnable if self.random.random() >= self.circumstances.laziness]
        if not chosen and not inflight_request_ids:
            chosen = runnable[:1]
        if self.circumstances.overlap:
            chosen = chosen[: max(1, -(-len(active_requests) // 2))]
        if self.circumstances.solitary:
            chosen = self.random.sample(chosen, min(len(chosen), 1))
        widths = sorted({request.beam_width for request in chosen if not request.is_context})
        if len(widths) > 1:                                         # a step generates for one of them
            width = self.random.choice(widths)
            chosen = [request for request in chosen if request.is_context or request.beam_width == width]
        self.num_pauses += len(paused)
        contexts = [request for request in chosen if request.is_context]
        return SchedulerOutput(contexts, [request for request in chosen if not request.is_context], paused,
                               [self.chunk_of(request.remaining_context) for request in contexts])

    def chunk_of(self, left: int) -> int:
        chunk, block = self.circumstances.chunk, self.limits.tokens_per_block
        if chunk == 0:
            chunk = block * self.random.randint(1, max(1, left // block))
        return left if chunk is None else min(chunk, left)


class Laboratory:
    """Runs requests on one checkpoint and compares the outcomes with those of the same requests run alone.

    It keeps its backends, one for each layout, and the outcomes of requests that ran alone.

    reference   the Laboratory in which requests run alone; None: this one
    graph       see build_native_backend
    most        sequences of a step, and most_tokens its tokens
    reused      request id -> largest number of prompt tokens that the request reused from the cache in the last run
    """

    def __init__(self, folder: Path, *, dtype: str = "float32", deterministic: bool = True, num_threads: int = 1,
                 tokens_per_block: int = 8, kv_cache_options: dict | None = None, max_beam_width: int = 1,
                 cpu_compile: bool | None = None, quantization: str | None = None,
                 reference: "Laboratory | None" = None, graph=CapturedGraph, most: int = 32,
                 most_tokens: int = 8192) -> None:
        self.folder, self.graph = folder, graph
        self.kv = KvCacheConfig(tokens_per_block=tokens_per_block, max_tokens=8192, **(kv_cache_options or {}))
        self.params = TrtGptModelOptionalParams(
            dtype=dtype, device="cpu", deterministic=deterministic, num_threads=num_threads, max_batch_size=most,
            cpu_compile=cpu_compile, quantization=quantization, max_num_sequences=most, max_num_tokens=most_tokens,
            kv_cache_config=self.kv)
        self.max_beam_width, self.reference = max_beam_width, reference
        self._backends, self._alone = {}, {}
        self.num_pauses = 0
        self.reused: dict[int, int] = {}

    def backend(self, layout: str):
        """Return the backend of this layout. Its count of operations is set to 0 for a new engine."""
        if layout not in self._backends:
            self._backends[layout] = build_native_backend(
                self.folder, self.params, layout=LAYOUTS[layout], num_slots=self.params.max_num_sequences,
                max_beam_width=self.max_beam_width, graph=self.graph, max_draft_tokens=MOST_DRAFTS)
        self._backends[layout]._operations.num_done = 0
        return self._backends[layout]

    def alone(self, ask: Ask) -> Outcome:
        if self.reference is not None:
            return self.reference.alone(ask)
        if ask not in self._alone:
            self._alone[ask] = self.run({0: ask}, Circumstances())[0]
        return self._alone[ask]

    def run(self, asks: dict[int, Ask], circumstances: Circumstances) -> dict[int, Outcome]:
        """Run all requests in one engine under these circumstances, and return the outcome of each request id."""
        schedulers, drafter = [], None
        if circumstances.drafts is not None and not circumstances.static and circumstances.layout != "padded":
            texts = {request_id: self.alone(ask).tokens[circumstances.resumed.get(request_id, 0):]
                     for request_id, ask in asks.items() if ask.beam_width == 1}
            drafter = KnowingDrafter(texts, vocab_of(self.folder.name), circumstances.drafts, circumstances.seed)

        def scheduler(limits, kv_cache_manager):
            schedulers.append(ScriptedScheduler(circumstances, limits, kv_cache_manager))
            return schedulers[0]

        params = TrtGptModelOptionalParams(
            max_batch_size=32, enable_trt_overlap=circumstances.overlap and not circumstances.static,
            speculative_config=None if drafter is None else SpeculativeConfig("custom", MOST_DRAFTS),
            kv_cache_config=KvCacheConfig(tokens_per_block=self.kv.tokens_per_block,
                                          enable_block_reuse=circumstances.reuse))
        arrivals = [(circumstances.arrivals.get(request_id, 0), ask.request(request_id))
                    for request_id, ask in asks.items()]
        for request_id, count in circumstances.resumed.items():
            place = list(asks).index(request_id)
            iteration, request = arrivals[place]
            arrivals[place] = iteration, resume(request, self.alone(asks[request_id]).tokens[:count])
        for request_id, text in {} if drafter is None else drafter.texts.items():
            request = arrivals[list(asks).index(request_id)][1]
            request.input_tensors["draft_input_ids"] = drafter.guesses(text[:MOST_DRAFTS])
        layout = "padded" if circumstances.static else circumstances.layout        # V1 has the form `padded` alone
        outcomes = drive(params, self.backend(layout), arrivals, static=circumstances.static,
                         scheduler=None if circumstances.static else scheduler,
                         max_beam_width=self.max_beam_width, drafter=drafter).outcomes
        self.reused = schedulers[0].reused if schedulers else {}
        self.num_pauses += sum(scheduler.num_pauses for scheduler in schedulers)
        return outcomes

    def differences(self, asks: dict[int, Ask], circumstances: Circumstances) -> dict[int, list[str]]:
        """Run the requests {request id: Ask} in one engine, and compare each outcome with that of a run alone.

        Returns {request id: names of the fields of Outcome that differ}, without the requests that have no difference.
        """
        outcomes = self.run(asks, circumstances)
        found = {request_id: self.alone(ask).differences(outcomes[request_id])
                 for request_id, ask in asks.items() if request_id not in circumstances.resumed}
        for request_id, count in circumstances.resumed.items():
            found[request_id] = self.alone(asks[request_id]).after(count).differences(outcomes[request_id].after(0))
        return {request_id: names for request_id, names in found.items() if names}

    def close(self) -> None:
        for backend in self._backends.values():
            backend.close()


class DifferentialClient(ArrivingClient):
    """A client that hands over requests at given iterations, and receives one response for each.

    arrivals   (iteration, request) of each request
    outcomes   request id -> the outcome in its response
    """

    def __init__(self, arrivals: list[tuple[int, InferenceRequest]]) -> None:
        super().__init__(arrivals)
        self.outcomes: dict[int, Outcome] = {}

    def received(self, request_id: int, tensors: list, final: bool, error: str) -> None:
        assert final and not error, error
        self.outcomes[request_id] = outcome_of({tensor.name: np.asarray(tensor.tensor) for tensor in tensors})


def drive(params: TrtGptModelOptionalParams, backend, arrivals: list[tuple[int, InferenceRequest]], *, scheduler=None,
          static: bool = False, max_beam_width: int = 1, drafter=None) -> DifferentialClient:
    """Run the engine's loop in this thread until all requests have ended. Return the client.

    The backend stays open.

    arrivals   (iteration, request) of each request
    """
    client = DifferentialClient(arrivals)
    loop = make_loop(
        client, params=params, backend=backend, clock=SystemClock(), parts={"scheduler": scheduler, "drafter": drafter},
        model_type=TrtGptModelType.V1 if static else TrtGptModelType.InflightFusedBatching,
        max_beam_width=max_beam_width, exclude_input=True)
    while len(client.outcomes) < len(arrivals):
        loop.step(accept_new=True)
        client.iteration += 1
        assert loop.failure is None and client.iteration < 10_000, loop.failure
    return client


def outcome_of(tensors: dict[str, np.ndarray]) -> Outcome:
    """Return the outcome in the tensors of a final response whose output excludes the prompt."""
    length = int(tensors["sequence_length"][0, 0])
    return Outcome(tuple(tensors["output_ids"][0, 0][:length].tolist()), *(
        b"".join(tensors[name].tobytes() for name in names if name in tensors) for names in (
            ["output_log_probs"], ["generation_logits"], ["context_logits"],
            ["output_ids", "sequence_length", "cum_log_probs", "finish_reason", *TOP_TENSORS])))


@dataclass(frozen=True)
class Reused:
    """Result of `run_with_reuse`: the outcomes in the order of `asks`, and the total number of reused blocks."""

    outcomes: list[Outcome]
    blocks: int


def run_with_reuse(laboratory: Laboratory, params: TrtGptModelOptionalParams, asks: list[Ask]) -> Reused:
    """Run the requests one after the other in one engine, so that each can reuse the blocks of those before it."""
    arrivals = [(100 * number, ask.request(number)) for number, ask in enumerate(asks)]
    client = drive(params, laboratory.backend("fused"), arrivals)
    return Reused([client.outcomes[number] for number in range(len(asks))],
                  max(json.loads(record)["Reused KV cache blocks"] for record in client.stats))


SAMPLINGS = ({}, {"runtime_top_p": 0.9, "temperature": 0.8}, {"runtime_top_k": 40}, {"runtime_top_k": 5},
             {"runtime_top_p": 1.0, "temperature": 1.5}, {"runtime_top_k": 100, "runtime_top_p": 0.7},
             {"runtime_top_p": 0.95, "runtime_min_p": 0.02, "repetition_penalty": 1.3},
             {"runtime_top_p": 0.9, "runtime_top_p_decay": 0.9, "runtime_top_p_min": 0.3, "frequency_penalty": 0.4},
             {"presence_penalty": 0.7, "no_repeat_ngram_size": 2, "min_length": 3},
             {"runtime_top_p": 0.9, "return_top_log_probs": 3},
             {"temperature": 1.3, "raw_log_probs": True, "return_top_log_probs": 2})


def draw_ask(draw: random.Random, vocab: int, block: int, longest: int = 100) -> Ask:
    """Generate the content of a request: greedy or sampled, with or without penalties and other changes of logits.

    About half of the prompts are a whole number of blocks long, give or take one token.

    longest   approximate largest number of tokens of a prompt
    """
    blocks = max(1, longest // block)
    length = draw.choice([draw.randint(1, longest), block * draw.randint(1, blocks) + draw.choice([-1, 0, 1])])
    sampling = dict(draw.choice(SAMPLINGS))
    if sampling:
        sampling["random_seed"] = draw.getrandbits(63)
    return Ask(tuple(draw.randrange(vocab) for _ in range(length)), draw.randint(1, 10), tuple(sampling.items()))


def draw_circumstances(draw: random.Random, asks: dict[int, Ask], block: int) -> Circumstances:
    static = draw.random() < 0.15
    everywhere = draw.random() < 0.3
    return Circumstances(
        layout=draw.choice(list(LAYOUTS)),
        static=static,
        overlap=not static and draw.random() < 0.4,
        chunk=None if static else draw.choice([None, 0, 0, block, 2 * block, 3 * block]),
        pauses={} if static else {
            request_id: set(range(1, ask.count)) if everywhere else
            {number for number in range(1, ask.count) if draw.random() < 0.2}
            for request_id, ask in asks.items() if draw.random() < 0.6},
        arrivals={request_id: draw.choice([0, 0, draw.randint(0, 12)]) for request_id in asks},
        laziness=draw.choice([0.0, 0.0, 0.25]),
        seed=draw.getrandbits(32))


def vocab_of(family: str) -> int:
    return 4096 if family == "austen-4m" else VOCAB
