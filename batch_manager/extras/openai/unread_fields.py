"""Fields of request bodies without an effect here: fields of OpenAI's API that are not built, and of other servers.

A field passes if it asks for what happens anyway. Other values are refused, or logged once where the output cannot
differ.
"""

from typing import Any

import orjson

from ...contained_log import log
from ...errors import type_name
from .errors import refused

ANY = object()    # every value passes

# Labels and hints. They have no effect on an answer, by their meaning.
LABELS = ("user", "metadata", "safety_identifier", "prompt_cache_key", "session_id")

# Field -> (values that ask for what happens anyway, what happens). Other values are logged once.
LOGGED: dict[str, tuple[list[Any], str]] = {
    "store": ([False], "nothing is stored"),
    "service_tier": (["auto", "default"], "there is one tier; use priority"),
    "prompt_cache_retention": ([], "blocks stay in the cache until others need the room"),
    "prompt_cache_options": ([], "every prompt uses the cache"),
}

_OLD_TOOLS = "this older form is not supported; use tools and tool_choice"
_FOR_CHATS = "it is for chats"
_TEXT_ONLY = "this server generates text only"
_USE_RESPONSE_FORMAT = "not supported; use response_format with a JSON schema"
_NO_BEAMS = "beam search is not supported"
_NOT_IN_ANSWERS = "the answer cannot contain it"
_NOT_A_SAMPLER = "this sampling option is not supported"
_TO_TEMPLATE = "pass it in chat_template_kwargs, if the model's template uses it"

# Field -> (values that ask for what happens anyway, or ANY; why other values are refused). ANY is for fields that have
# an effect with another field only, and that field is refused. A null passes in every field.
NOT_BUILT: dict[str, tuple[Any, str]] = {
    # OpenAI
    "suffix": ([""], "insertion before a suffix is not supported; leave it out"),
    "functions": ([[]], _OLD_TOOLS), "function_call": (["none", "auto"], _OLD_TOOLS),
    "modalities": ([["text"]], _TEXT_ONLY), "audio": ([], _TEXT_ONLY),
    "prediction": ([], "predicted outputs are not supported"), "moderation": ([], "outputs are not moderated"),
    "web_search_options": ([], "web search is not supported"),
    "verbosity": (["medium"], _TO_TEMPLATE),
    # vLLM
    "use_beam_search": ([False], _NO_BEAMS), "length_penalty": ([1], _NO_BEAMS), "early_stopping": ([False], _NO_BEAMS),
    "skip_special_tokens": ([True], "the text has no special tokens"),
    "spaces_between_special_tokens": ([True, False], "expected true or false"),
    "detokenize": ([True], "the answer has text"),
    "include_stop_str_in_output": ([False], "a stop string is not part of the text"),
    "truncate_prompt_tokens": ([], "prompts are not truncated"), "truncation_side": (ANY, ""),
    "prompt_logprobs": ([], "use echo with logprobs, at /v1/completions"),
    "logprob_token_ids": ([], _NOT_IN_ANSWERS),
    "allowed_token_ids": ([], "not supported; use logit_bias"), "bad_words": ([[]], "not supported; use logit_bias"),
    "logits_processors": ([[]], "requests cannot bring code"),
    "watermarking": ([False], _NOT_A_SAMPLER),
    "include_reasoning": ([True], "reasoning is part of the answer"),
    "continue_final_message": ([False], "the last message is not continued"),
    "documents": ([], _TO_TEMPLATE), "chat_template": ([], "the server uses the model's own template"),
    "media_io_kwargs": ([{}], _TEXT_ONLY), "mm_processor_kwargs": ([{}], _TEXT_ONLY),
    "structured_outputs": ([], _USE_RESPONSE_FORMAT), "guided_json": ([], _USE_RESPONSE_FORMAT),
    "guided_regex": ([], _USE_RESPONSE_FORMAT), "guided_choice": ([], _USE_RESPONSE_FORMAT),
    "guided_grammar": ([], _USE_RESPONSE_FORMAT), "structural_tag": ([], _USE_RESPONSE_FORMAT),
    "guided_decoding_backend": (ANY, ""), "guided_whitespace_pattern": (ANY, ""),
    "request_id": ([], "send the header X-Request-Id"),
    "return_tokens_as_token_ids": ([False], _NOT_IN_ANSWERS), "return_token_ids": ([False], _NOT_IN_ANSWERS),
    "return_token_offsets": ([False], _NOT_IN_ANSWERS), "return_prompt_text": ([False], _NOT_IN_ANSWERS),
    "return_mm_kwargs": (ANY, ""), "routed_experts_prompt_start": (ANY, ""),
    "cache_salt": ([], "the cache is shared by all requests"), "repetition_detection": ([], _NOT_A_SAMPLER),
    "ec_transfer_params": ([], "KV caches are not transferred"), "vllm_xargs": ([{}], "there are no extensions"),
    "stream_interval": ([1], "each step's text is sent at once"),
    "prompt_embeds": ([], "prompts are text or token ids"),
    # SGLang
    "regex": ([], _USE_RESPONSE_FORMAT), "ebnf": ([], _USE_RESPONSE_FORMAT), "stop_regex": ([], "use stop"),
    "no_stop_trim": ([False], "a stop string is not part of the text"),
    "lora_path": ([], "name the adapter as model"), "session_params": ([], "there are no sessions"),
    "stream_reasoning": ([True], "reasoning is streamed"),
    "return_hidden_states": ([False], _NOT_IN_ANSWERS), "return_routed_experts": ([False], _NOT_IN_ANSWERS),
    "routed_experts_start_len": (ANY, ""), "return_meta_info": ([False], _NOT_IN_ANSWERS),
    "return_cached_tokens_details": ([False], "usage has prompt_tokens_details.cached_tokens"),
    "return_prompt_token_ids": ([False], _NOT_IN_ANSWERS),
    "custom_logit_processor": ([], "requests cannot bring code"), "custom_params": (ANY, ""),
    "rid": ([], "send the header X-Request-Id"), "extra_key": ([], "the cache is shared by all requests"),
    "custom_labels": ([{}], "metrics have no labels of requests"), "images_config": ([], _TEXT_ONLY),
    "use_audio_in_video": ([False], _TEXT_ONLY), "input_ids": ([], "use /v1/completions with token ids as the prompt"),
    # llama.cpp
    "cache_prompt": ([True], "prompts use the cache"), "n_cache_reuse": ([0], "only equal beginnings are reused"),
    "id_slot": ([-1], "the engine chooses the slot"), "n_keep": ([0], "a prompt is not cut"), "n_discard": (ANY, ""),
    "n_indent": ([0], _NOT_A_SAMPLER), "n_cmpl": ([1], "use n"), "n_predict": ([], "use max_tokens"),
    "n_probs": ([0], "use logprobs"), "post_sampling_probs": ([False], "log-probabilities are the model's own"),
    "min_keep": ([0], _NOT_A_SAMPLER), "t_max_predict_ms": ([-1, 0], "there is no time limit"),
    "samplers": ([], _NOT_A_SAMPLER), "backend_sampling": ([False], _NOT_A_SAMPLER),
    "typical_p": ([1], _NOT_A_SAMPLER), "tfs_z": ([1], _NOT_A_SAMPLER), "top_a": ([0], _NOT_A_SAMPLER),
    "top_n_sigma": ([-1], _NOT_A_SAMPLER), "xtc_probability": ([0], _NOT_A_SAMPLER), "xtc_threshold": (ANY, ""),
    "dynatemp_range": ([0], _NOT_A_SAMPLER), "dynatemp_exponent": (ANY, ""),
    "mirostat": ([0], _NOT_A_SAMPLER), "mirostat_tau": (ANY, ""), "mirostat_eta": (ANY, ""),
    "adaptive_target": ([-1], _NOT_A_SAMPLER), "adaptive_decay": (ANY, ""),
    "dry_multiplier": ([0], _NOT_A_SAMPLER), "dry_base": (ANY, ""), "dry_allowed_length": (ANY, ""),
    "dry_penalty_last_n": (ANY, ""), "dry_sequence_breakers": (ANY, ""),
    "repeat_penalty": ([1], "use repetition_penalty"), "repeat_last_n": (ANY, ""), "penalize_nl": (ANY, ""),
    "grammar": ([""], _USE_RESPONSE_FORMAT), "json_schema": ([], _USE_RESPONSE_FORMAT),
    "grammar_lazy": (ANY, ""), "grammar_triggers": (ANY, ""), "preserved_tokens": (ANY, ""),
    "lora": ([[]], "name the adapter as model"), "image_data": ([[]], _TEXT_ONLY), "parse_tool_calls": (ANY, ""),
    "reasoning_budget_tokens": ([-1], "use max_thinking_tokens"),
    "reasoning_control": ([False], "use max_thinking_tokens"),
    "thinking_forced_open": ([False], _TO_TEMPLATE), "timings_per_token": ([False], "use return_timings"),
    "return_tokens": ([False], _NOT_IN_ANSWERS), "return_progress": ([False], _NOT_IN_ANSWERS),
    "response_fields": ([[]], _NOT_IN_ANSWERS), "verbose": ([False], _NOT_IN_ANSWERS),
    "sse_ping_interval": ([-1], "streams have no pings"),
}
OF_CHATS: dict[str, tuple[Any, str]] = {
    "add_special_tokens": ([False], "the chat template inserts the special tokens"),
    "echo": ([False], "use /v1/completions"), "n_predict": ([-1], "use max_tokens"),
}
OF_COMPLETIONS: dict[str, tuple[Any, str]] = {
    "add_special_tokens": ([True], "the tokenizer inserts its special tokens; pass token ids to have none"),
    "add_generation_prompt": ([True], _FOR_CHATS), "chat_template_kwargs": ([{}], _FOR_CHATS),
    "tools": ([[]], _FOR_CHATS), "tool_choice": (["none", "auto"], _FOR_CHATS), "parallel_tool_calls": (ANY, ""),
    "reasoning_effort": ([], _FOR_CHATS), "max_thinking_tokens": ([], _FOR_CHATS),
    "thinking_token_budget": ([], _FOR_CHATS), "separate_reasoning": ([True, False], _FOR_CHATS),
    "reasoning_format": (["none", "auto"], _FOR_CHATS),
}

_logged: set[str] = set()


def is_unread(name: str, value: object, is_chat: bool) -> bool:
    """Return whether a field is known and passes without an effect. False: the name is unknown.

    Raises OpenAIError if the field asks for something that is not built. Logs a field of `LOGGED` once.
    """
    if name in LABELS:
        return True
    if name in LOGGED:
        harmless, what = LOGGED[name]
        if not _is_one_of(value, harmless):
            log_once(name, what)
        return True
    entry = (OF_CHATS if is_chat else OF_COMPLETIONS).get(name) or NOT_BUILT.get(name)
    if entry is None:
        return False
    harmless, why = entry
    if harmless is not ANY and not _is_one_of(value, harmless):
        got = orjson.dumps(value).decode() if isinstance(value, bool | int | float) else type_name(value)
        expected = " or ".join(orjson.dumps(each).decode() for each in harmless) or "null"
        raise refused(name, f"got {got}; expected {expected}; {why}")
    return True


def log_once(name: str, what: str, fact: str = "has no effect") -> None:
    """Log a fact of a value of a field. `what` is what happens instead."""
    if name not in _logged:
        _logged.add(name)
        log.warning("a request to the OpenAI service has a value of %s that %s: %s; this is logged once", name, fact,
                    what)


def _is_one_of(value: object, values: list[Any]) -> bool:
    """Return whether a JSON value is one of `values`; true is not 1."""
    return any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in values)
