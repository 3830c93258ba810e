"""Drafts of the engine."""

from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike, fspath
from typing import Any

from ..errors import ConfigError
from ..option_values import exact_number, object_of_option, put_count, shown_option
from .values import QUANTIZATIONS

MAX_DRAFT_TOKENS = 64         # of a sequence in one step
DRAFT_METHODS = ("ngram", "suffix", "custom", "draft_model")
MAX_LOOKUP = 16               # tokens of an n-gram
MAX_TREE_DEPTH = 256          # tokens of a path of a suffix tree
_LIKE_THIS = """{"method": "ngram", "num_speculative_tokens": 7}"""


@dataclass(frozen=True, slots=True)
class SpeculativeConfig:
    """How the engine drafts tokens, which the model verifies in one step. The tokens of a request do not change.

    method                   "ngram": the tokens after the earlier occurrence of the request's last tokens, in its own
                             prompt and output, that agrees with the most of them. "suffix": those that most often
                             followed the longest such occurrence, by the library arctic-inference. "custom":
                             Parts.drafter drafts. "draft_model": a second model drafts, and samples as the request
    num_speculative_tokens   most drafts of a sequence in a step
    prompt_lookup_max, prompt_lookup_min   how many of the last tokens must have occurred: the most, else fewer
    suffix_decoding_max_tree_depth    of "suffix": most tokens of an occurrence with its drafts
    suffix_decoding_max_spec_factor   of "suffix": most drafts for each token of the occurrence, above 0
    suffix_decoding_min_token_prob    of "suffix": drafts end before a token that followed more rarely, 0 to 1
    model                    of "draft_model": path like `model_path`, with the same vocabulary
    quantization             of `model`, as in TrtGptModelOptionalParams
    """

    method: str = "ngram"
    num_speculative_tokens: int = 7
    prompt_lookup_max: int = 4
    prompt_lookup_min: int = 2
    suffix_decoding_max_tree_depth: int = 24
    suffix_decoding_max_spec_factor: float = 1.0
    suffix_decoding_min_token_prob: float = 0.1
    model: str | PathLike[str] | None = None
    quantization: str | None = None

    def __post_init__(self) -> None:
        if self.method not in DRAFT_METHODS:
            raise ConfigError(f"SpeculativeConfig.method is {self.method!r}"[:200],
                              f"expected one of {', '.join(map(repr, DRAFT_METHODS))}",
                              "heads of other engines are not supported")
        self._check_model()
        put_count(self, "num_speculative_tokens", maximum=MAX_DRAFT_TOKENS, owner="SpeculativeConfig.")
        put_count(self, "prompt_lookup_max", maximum=MAX_LOOKUP, owner="SpeculativeConfig.")
        put_count(self, "prompt_lookup_min", maximum=self.prompt_lookup_max, owner="SpeculativeConfig.")
        put_count(self, "suffix_decoding_max_tree_depth", minimum=2, maximum=MAX_TREE_DEPTH, owner="SpeculativeConfig.")
        for name, least, most, expectation in (
                ("suffix_decoding_max_spec_factor", 1 / MAX_TREE_DEPTH, MAX_TREE_DEPTH, "1/256 to 256"),
                ("suffix_decoding_min_token_prob", 0, 1, "0 to 1")):
            number = exact_number(getattr(self, name))
            if number is None or not least <= number <= most:
                raise ConfigError(f"SpeculativeConfig.{name} is {shown_option(getattr(self, name))}",
                                  f"expected a number from {expectation}")
            object.__setattr__(self, name, float(number))

    def _check_model(self) -> None:
        path, has_model = self.model, self.method == "draft_model"
        if (path is not None) is not has_model:
            raise ConfigError(f"SpeculativeConfig.method is {self.method!r} with {'a' if path else 'no'} model"[:200],
                              "'draft_model' is the method of a model", "set both or neither")
        if has_model and not (isinstance(path, str | PathLike) and isinstance(fspath(path), str) and fspath(path)):
            raise ConfigError(f"SpeculativeConfig.model is {path!r}"[:200], "expected the path of a model",
                              "pass the folder of a Hugging Face checkpoint or a .gguf file")
        if path is not None:
            object.__setattr__(self, "model", fspath(path))
        if self.quantization is not None and not (isinstance(self.quantization, str) and has_model
                                                  and self.quantization in QUANTIZATIONS):
            raise ConfigError(f"SpeculativeConfig.quantization is {self.quantization!r} with method {self.method!r}",
                              f"expected one of {', '.join(QUANTIZATIONS)}, with 'draft_model'", "leave it out")

    @classmethod
    def of(cls, given: Mapping[str, Any] | str) -> "SpeculativeConfig":
        """Return the config of a mapping with vLLM's keys, or of its JSON, with a `method`. Raises ConfigError."""
        if isinstance(given, str):
            given = object_of_option("speculative_config", given, _LIKE_THIS)
        if not isinstance(given, Mapping):
            raise ConfigError(f"speculative_config is of type {type(given).__name__}",
                              "expected a mapping with its fields, or its JSON", f"pass for instance {_LIKE_THIS}")
        known = list(cls.__dataclass_fields__)
        if unknown := [str(name)[:64] for name in given if name not in known]:
            raise ConfigError(f"speculative_config has {unknown[0]!r}", f"its keys are {', '.join(known)}",
                              "leave it out: heads of other engines are not supported")
        if "method" not in given:
            raise ConfigError("speculative_config has no method",
                              f"expected one of {', '.join(map(repr, DRAFT_METHODS))}",
                              f"pass for instance {_LIKE_THIS}")
        return cls(**given)
