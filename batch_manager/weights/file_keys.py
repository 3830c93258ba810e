"""The keys of the text and generation files of a model folder, and what becomes of each.

A key is read, changes nothing (here as in transformers, when the folder has a tokenizer.json), or is logged once when
the model or tokenizer is loaded. Keys that are in neither table are logged.
"""

from collections.abc import Mapping
from typing import Any

SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")

# File -> keys that are read. Keys with other names that end in `_token` name special tokens too. added_tokens.json has
# tokens as keys. chat_template.jinja and additional_chat_templates/*.jinja have none. chat_template.json belongs to
# processors of images and sound, and neither transformers' AutoTokenizer nor this package reads it.
READ: Mapping[str, frozenset[str]] = {
    "tokenizer.json": frozenset((
        "version", "truncation", "padding", "added_tokens", "normalizer", "pre_tokenizer", "post_processor", "decoder",
        "model")),    # truncation and padding are switched off
    "tokenizer_config.json": frozenset((
        *SPECIAL_TOKENS, "added_tokens_decoder", "additional_special_tokens", "extra_special_tokens", "chat_template",
        "clean_up_tokenization_spaces", "split_special_tokens", "tokenizer_class",
        "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output")),
    "special_tokens_map.json": frozenset((*SPECIAL_TOKENS, "additional_special_tokens", "extra_special_tokens")),
    "generation_config.json": frozenset(("eos_token_id",)),
}

# File -> keys that change neither token ids nor text, or that only say how transformers computes the same tokens.
WITHOUT_EFFECT: Mapping[str, frozenset[str]] = {
    "tokenizer_config.json": frozenset((
        "add_bos_token", "add_eos_token", "processor_class", "model_max_length", "max_len",
        "padding_side", "truncation_side", "model_input_names", "name_or_path", "tokenizer_file", "vocab_file",
        "merges_file", "special_tokens_map_file", "init_inputs", "backend", "files_loaded", "is_local",
        "local_files_only", "verbose", "trust_remote_code", "sp_model_kwargs", "spaces_between_special_tokens",
        "use_default_system_prompt", "legacy", "errors", "from_slow", "max_length", "stride", "truncation_strategy",
        "pad_to_multiple_of", "pad_token_type_id", "pad_token_type", "transformers_version", "response_schema")),
    "generation_config.json": frozenset((
        "bos_token_id", "pad_token_id", "decoder_start_token_id", "transformers_version", "_from_model_config",
        "use_cache", "cache_implementation", "cache_config", "max_cache_len", "low_memory", "output_attentions",
        "output_hidden_states", "output_scores", "output_logits", "return_dict_in_generate", "num_return_sequences",
        "compile_config", "disable_compile", "prefill_chunk_size", "continuous_batching_config", "use_mtp",
        "is_assistant", "num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold",
        "assistant_early_exit", "assistant_ensemble_weight", "assistant_lookbehind", "target_lookbehind",
        "prompt_lookup_num_tokens", "max_matching_ngram_size", "speculation_type", "renormalize_logits",
        "remove_invalid_values", "early_stopping", "length_penalty", "diversity_penalty", "num_beam_groups")),
}

# Values with which a key changes nothing.
_NEUTRAL: Mapping[str, object] = {
    "do_sample": False, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "typical_p": 1.0, "repetition_penalty": 1.0,
    "encoder_repetition_penalty": 1.0, "no_repeat_ngram_size": 0, "encoder_no_repeat_ngram_size": 0, "num_beams": 1,
    "min_length": 0, "epsilon_cutoff": 0.0, "eta_cutoff": 0.0, "guidance_scale": 1.0, "token_healing": False,
    "add_prefix_space": False, "fix_mistral_regex": False}


def unread(name: str, values: Mapping[str, Any]) -> list[str]:
    """Return the keys of a file that may matter and are not read, in the order of the file.

    name     of the file, such as tokenizer_config.json
    values   the file's JSON object
    """
    read, without = READ[name], WITHOUT_EFFECT.get(name, frozenset())
    return [key for key, value in values.items()
            if key not in read and key not in without and not key.endswith("_token") and value is not None
            and value not in ([], {}, "") and not (key in _NEUTRAL and value == _NEUTRAL[key])]
