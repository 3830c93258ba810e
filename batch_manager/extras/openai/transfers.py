"""Prompts that one server computes and another continues: --kv-transfer-config and `kv_transfer_params`, as at vLLM."""

from typing import Any

from ...config import KvTransferConfig
from ...errors import ConfigError, InvalidRequestError, type_name
from ...names import RequestType
from ...option_values import object_of_option
from ...requests.context_phase import ContextPhaseParams
from .errors import refused
from .json_object import JsonObject

# vLLM's name -> field of KvTransferConfig, and the names of our own in kv_connector_extra_config.
FIELDS = {"kv_role": "role", "kv_ip": "host", "kv_port": "port", "kv_load_failure_policy": "load_failure_policy"}
EXTRA = ("peers", "held_blocks_fraction", "timeout_s", "load_timeout_s", "host_cache_size")
IGNORED = ("kv_connector", "engine_id")
NAME = "kv_transfer_params"


def options_of_json(text: str) -> tuple[KvTransferConfig, int]:
    """Return the options of the JSON text of --kv-transfer-config, and the bytes of host memory for blocks.

    Raises ConfigError.
    """
    what = "the configuration of KV transfers"
    given = object_of_option(what, text, '{"kv_role": "kv_producer"}')
    options = given.pop("kv_connector_extra_config", {})
    if not isinstance(options, dict):
        raise ConfigError(f"kv_connector_extra_config of {what} is JSON of type {type_name(options)}",
                          "expected a JSON object", 'pass for instance {"timeout_s": 60}')
    given = {name: value for name, value in given.items() if name not in IGNORED}
    if unknown := sorted(given.keys() - FIELDS) + sorted(options.keys() - set(EXTRA)):
        raise ConfigError(f"{what} has {unknown[0]!r:.100}", f"known are {', '.join((*IGNORED, *FIELDS))}, and in "
                          f"kv_connector_extra_config {', '.join(EXTRA)}", "leave the others out")
    options |= {FIELDS[name]: value for name, value in given.items()}
    if isinstance(role := options.get("role"), str):
        options["role"] = role.removeprefix("kv_")
    size = options.pop("host_cache_size", 0)
    return KvTransferConfig(**options), size


def read_transfer(fields: JsonObject) -> tuple[RequestType, ContextPhaseParams | None]:
    """Read the field `kv_transfer_params` of a body. Raises OpenAIError."""
    given = fields.take(NAME, dict) or {}
    decodes_elsewhere, has_prompt_elsewhere = flags = [
        given.get(name) for name in ("do_remote_decode", "do_remote_prefill")]
    if not {*map(type, flags)} <= {bool, type(None)}:
        raise refused(NAME, "expected do_remote_decode and do_remote_prefill to be true or false")
    if decodes_elsewhere and has_prompt_elsewhere:
        raise refused(NAME, "expected do_remote_decode or do_remote_prefill to be true, not both")
    if decodes_elsewhere:
        return RequestType.CONTEXT_ONLY, None
    if not has_prompt_elsewhere:
        return RequestType.CONTEXT_AND_GENERATION, None
    try:
        return RequestType.GENERATION_ONLY, ContextPhaseParams.of_json(given)
    except InvalidRequestError as error:
        raise refused(NAME, str(error).removeprefix(f"{NAME} ")) from None


def answered(params: ContextPhaseParams) -> dict[str, Any]:
    """Return the field `kv_transfer_params` of an answer."""
    return {**params.to_json(), "remote_engine_id": f"{params.host}:{params.port}"}
