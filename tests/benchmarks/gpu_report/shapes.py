"""Shapes of public models for measuring engines, and a lower bound on the time of their steps."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .bench import Bench


@dataclass(frozen=True, slots=True)
class Shape:
    """A decoder model.

    hidden, intermediate, head_size   sizes of vectors, in elements
    tied                              whether the output head is the embedding
    """

    name: str
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    vocabulary: int
    tied: bool
    family: str = "llama"
    positions: int = 32768

    def config(self) -> dict[str, Any]:
        """Return the contents of config.json."""
        return {
            "architectures": [{"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}[self.family]],
            "model_type": self.family, "hidden_size": self.hidden, "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers, "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads, "head_dim": self.head_size, "vocab_size": self.vocabulary,
            "max_position_embeddings": self.positions, "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
            "tie_word_embeddings": self.tied, "hidden_act": "silu", "torch_dtype": "bfloat16"}

    def write(self, folder: Path) -> Path:
        """Create a folder in `folder` that an engine can load with random weights, and return its path."""
        folder = folder / self.name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config()))
        return folder

    @property
    def matrix_entries(self) -> int:
        """Number of entries of all weight matrices that a step multiplies by, including the output head."""
        attention = self.hidden * self.head_size * 2 * (self.heads + self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.intermediate) + self.vocabulary * self.hidden

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of keys and values per token, in bfloat16."""
        return 2 * 2 * self.layers * self.kv_heads * self.head_size

    def least_step_seconds(self, bench: Bench, batch: int, context: int) -> float:
        """Return a lower bound for the seconds of a generation step in bfloat16, at the measured rates of this GPU.

        The bound is the time to read the keys and values, plus `least_matrix_seconds`.
        """
        return (batch * context * self.kv_bytes_per_token / bench.copy_bytes_s
                + self.least_matrix_seconds(bench, batch))

    def least_matrix_seconds(self, bench: Bench, batch: int) -> float:
        """Return the time to read the weight matrices or to multiply `batch` rows by them, whichever is longer."""
        return 2 * self.matrix_entries * max(1 / bench.copy_bytes_s, batch / bench.matmul_flop_s)


LLAMA_135M = Shape("llama-135m", 576, 1536, 30, 9, 3, 64, 49152, tied=True)
LLAMA_1B = Shape("llama-1b", 2048, 8192, 16, 32, 8, 64, 128256, tied=True)
LLAMA_8B = Shape("llama-8b", 4096, 14336, 32, 32, 8, 128, 128256, tied=False)
QWEN3_600M = Shape("qwen3-0.6b", 1024, 3072, 28, 16, 8, 128, 151936, tied=True, family="qwen3")
TINY = Shape("tiny", 16, 16, 1, 2, 1, 8, 40, tied=True, positions=256)
