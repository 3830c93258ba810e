"""The performance goals of the GPU report. Each is a ratio of two numbers.

For most goals, the same run of the report measures both numbers.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Goal:
    """One goal.

    text      definition of the ratio
    floor     limit of the ratio: the smallest ratio that meets the goal, or with lower_is_better the largest;
              None: the ratio is only reported
    """

    name: str
    text: str
    floor: float | None
    lower_is_better: bool = False


_ROWS = (
    Goal("G1", "decode attention, bytes of keys and values read per second / copy bandwidth; 8 KV heads of 128 with 4 "
         "query heads each, 64 sequences of 4,096 tokens", 0.90),
    Goal("G1-ragged", "the same with lengths drawn from 1 to 8,192", 0.85),
    Goal("G1b", "decode attention / copy bandwidth; 3 KV heads of 64 with 3 query heads each, 256 sequences of 512",
         0.80),
    Goal("G1c", "decode attention of one sequence, time per layer / time of the peer", 1.2, lower_is_better=True),
    Goal("G2", "context attention, causal operations per second / rate of a matrix product; heads of 128", 0.50),
    Goal("G2b", "context attention / rate of the peer, heads of 128", 0.75),
    Goal("G2b-64", "context attention / rate of the peer, heads of 64", 0.85),
    Goal("G3", "decode step of an 8B Llama, lower bound by bandwidth and arithmetic / measured time", 0.75),
    Goal("G3b-1B", "the same for a 1B Llama, one sequence", 0.60),
    Goal("G3b-135M", "the same for a 135M Llama, 256 sequences", 0.50),
    Goal("G3-fused", "time of norm, matrix product and activation in separate launches / in one launch", None),
    Goal("G4", "idle time of the GPU between decode steps / 20 microseconds", 1.0, lower_is_better=True),
    Goal("G4-share", "idle time of the GPU / time of a decode step", 0.02, lower_is_better=True),
    Goal("G5", "host time of an iteration, 256 streaming requests, without the model / 500 microseconds", 1.0,
         lower_is_better=True),
    Goal("G5b", "the same without streaming / 150 microseconds", 1.0, lower_is_better=True),
    Goal("G6", "output tokens per second / 18,500 on an H100, 26,000 on an H200; Qwen3-0.6B, 256 requests, prompts and "
         "outputs of 100 to 1,024 tokens, temperature 0.6", 1.0),
    Goal("G6-share", "the same, shortest possible time by bandwidth and arithmetic / measured time", 0.66),
    Goal("G6-peer", "the same, output tokens per second / rate of a peer", 1.0),
    Goal("G6b", "the same / transformers' continuous batching", 3.0),
    Goal("G7", "time between tokens under random arrivals with chunked contexts, p99 / p50", 2.0,
         lower_is_better=True),
    Goal("G8", "135M Llama, 256 sequences: tokens per second with run_ahead / in lockstep", 1.3),
    Goal("G8-overlap", "the same: two micro-batches / lockstep", None),
    Goal("G9", "time of four workloads on an 8B Llama at TensorRT-LLM's published FP8 rates on an H200 / measured time "
         "in bf16", 0.5),
    Goal("profile", "time of a kernel, or of the gaps between kernels / time of a decode step", None),
    Goal("sampling", "time of reading the logits of a step once / time of sampling its tokens", None),
    Goal("decode-split", "decode attention with other parts of sequences, bytes of keys and values read per second / "
         "copy bandwidth", None),
    Goal("quantised", "time of a product with plain weights / with quantised weights", None),
    Goal("settings", "time of a kernel with its present launch settings / with the settings of the case", None),
)
GOALS = {goal.name: goal for goal in _ROWS}

# Prerequisites of the goals, and facts. They are always measured, and reported in the same form.
CORRECTNESS = Goal("correctness", "relative error of a kernel against its oracle / allowed error", 1.0,
                   lower_is_better=True)
DENOMINATOR = Goal("denominator", "measured rates of this GPU for memory access and matrix products", None)
FACT = Goal("fact", "a property of the engine on this GPU", None)
ALL = {**GOALS, **{goal.name: goal for goal in (CORRECTNESS, DENOMINATOR, FACT)}}
