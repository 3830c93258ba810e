"""Declares the tensors of a request as attributes, for type checkers and editors.

`InferenceRequest` makes a property from each row of its table TENSORS at run time. These declarations let a type
checker report mistyped names.
"""

from typing import Any


class TensorAttributes:
    """Declares an attribute for each tensor and for each alias of a tensor.

    A value is a torch CPU tensor, a numpy array, a number or a list.
    """

    __slots__ = ()

    input_ids: Any
    input_token_extra_ids: Any
    request_output_len: Any
    max_new_tokens: Any
    input_lengths: Any
    end_id: Any
    pad_id: Any
    beam_width: Any
    temperature: Any
    runtime_top_k: Any
    runtime_top_p: Any
    runtime_top_p_decay: Any
    runtime_top_p_min: Any
    runtime_top_p_reset_ids: Any
    runtime_min_p: Any
    len_penalty: Any
    length_penalty: Any
    early_stopping: Any
    beam_search_diversity_rate: Any
    repetition_penalty: Any
    presence_penalty: Any
    frequency_penalty: Any
    prompt_ignore_length: Any
    no_repeat_ngram_size: Any
    min_length: Any
    random_seed: Any
    bad_words_list: Any
    stop_words_list: Any
    embedding_bias: Any
    prompt_embedding_table: Any
    prompt_vocab_size: Any
    lora_task_id: Any
    lora_weights: Any
    lora_config: Any
    draft_input_ids: Any
    draft_logits: Any
    context_phase_params: Any
    return_log_probs: Any
    return_top_log_probs: Any
    raw_log_probs: Any
    return_context_logits: Any
    return_generation_logits: Any
    return_perf_metrics: Any
    streaming: Any
