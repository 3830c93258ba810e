"""Which forms an engine will have, as far as its options and its device tell before anything is loaded."""

from collections.abc import Callable

import torch

from ...attention.interface import Attention
from ...config import TrtGptModelOptionalParams
from ...contained_log import log
from ...errors import ConfigError
from ...loading_thread import check_interruption
from ...models.spec import ModelSpec
from ...triton_kernels.cpu.native.library import TYPES, CannotCompileError, load_library
from ...triton_kernels.dispatch import use_triton
from .. import packing
from ..packing import Divide
from .form import ORDER

LARGEST_HEAD, LARGEST_BLOCK, BLOCK_UNIT = 256, 256, 16             # of compiled code
OWN_ATTENTION, DETERMINISTIC = "Parts.attention is set", "deterministic is set"


def wanted_forms(params: TrtGptModelOptionalParams, device: torch.device, layout: Divide,
                 attention_factory: Callable[..., Attention] | None) -> dict[str, str]:
    """Return name -> reason for each form that the engine will not have. It wants all other forms.

    Builds the library of compiled code if the engine wants `compiled`.

    layout   a function of packing.py, which divides a step into calls of the model
    Raises   ConfigError if cuda_graphs or cpu_compile is True and rules this out
    """
    found = dict.fromkeys(ORDER, "")
    if layout is packing.padded:
        found |= dict.fromkeys(("graph", "fused", "fixed", "packed"),
                               "TrtGptModelType.V1 pads steps to their static batch")
    else:
        found |= {"padded": "TrtGptModelType.V1 alone pads steps", "fixed": _kernels(params, device),
                  "fused": _kernels(params, device) or (OWN_ATTENTION if attention_factory is not None and
                                                        not use_triton(device) else "")}
        if attention_factory is not None:
            found["fixed"] = DETERMINISTIC if params.deterministic else ""       # if it can bind
    found["graph"] = obstacle_to_graphs(params, device, layout, attention_factory is not None)
    found["compiled"] = obstacle_to_compiling(params, device, attention_factory)
    return {name: reason for name, reason in found.items() if reason}


def _kernels(params: TrtGptModelOptionalParams, device: torch.device) -> str:
    """Return why the package's attention has no launches at fixed addresses; "" if it has."""
    if not use_triton(device):
        return f"the device is {device}" if device.type == "cpu" else "triton is not installed"
    return DETERMINISTIC if params.deterministic else ""


def obstacle_to_graphs(params: TrtGptModelOptionalParams, device: torch.device, layout: Divide, has_own_attention: bool
                       ) -> str:
    """Return why no graphs will be captured; "": nothing is known to prevent it.

    Raises ConfigError if cuda_graphs is True but graphs are impossible.
    """
    if params.cuda_graphs is False:
        return "cuda_graphs is False"
    obstacle = _obstacle_to_graphs(params, device, layout, has_own_attention)
    if obstacle and params.cuda_graphs:
        raise ConfigError(f"cuda_graphs is True, but {obstacle}", "graphs need a GPU with triton and the package's own "
                          "attention, without `deterministic` and without TrtGptModelType.V1",
                          "leave cuda_graphs unset to launch kernels one by one")
    return obstacle


def _obstacle_to_graphs(params: TrtGptModelOptionalParams, device: torch.device, layout: Divide,
                        has_own_attention: bool) -> str:
    if device.type != "cuda":
        return f"the device is {device}"
    if not use_triton(device):
        return "triton is not installed"
    if params.deterministic:
        return DETERMINISTIC
    if has_own_attention:
        return OWN_ATTENTION
    if layout is packing.padded:
        return "TrtGptModelType.V1 pads steps to their static batch"
    return ""


def obstacle_to_compiling(params: TrtGptModelOptionalParams, device: torch.device,
                          attention_factory: Callable[..., Attention] | None) -> str:
    """Return why matrices are not packed for compiled code; "" if they are.

    Raises ConfigError if cpu_compile is True, but the forward cannot run as compiled code.
    """
    obstacle, is_avoidable = _obstacle_to_compiling(params, device, attention_factory), False
    if not obstacle:
        try:
            load_library(check_interruption)
        except CannotCompileError as error:
            obstacle, is_avoidable = str(error), True
    if obstacle and params.cpu_compile:
        raise ConfigError(f"cpu_compile is True, but {obstacle}", "compiled steps need a CPU, a C compiler, the "
                          "package's own attention and deterministic=False",
                          "leave cpu_compile unset to run steps in torch")
    if is_avoidable:
        log.warning("steps run in torch, and the engine is 2 to 27 times slower than with compiled steps: %s", obstacle)
    return obstacle


def _obstacle_to_compiling(params: TrtGptModelOptionalParams, device: torch.device,
                           attention_factory: Callable[..., Attention] | None) -> str:
    if params.cpu_compile is False:
        return "cpu_compile is False"
    if device.type != "cpu":
        return f"the device is {device}"
    if use_triton(device):
        return "TRITON_INTERPRET is set"
    if params.deterministic:
        return DETERMINISTIC
    if attention_factory is not None:
        return OWN_ATTENTION
    block = params.kv_cache_config.tokens_per_block
    if block % BLOCK_UNIT or block > LARGEST_BLOCK:
        return f"tokens_per_block is {block}, not a multiple of {BLOCK_UNIT} up to {LARGEST_BLOCK}"
    return ""


def obstacle_of_model(spec: ModelSpec, dtype: torch.dtype) -> str:
    """Return why no model of this spec and data type runs as compiled code; "" if it may."""
    if dtype not in TYPES:
        return f"it computes in {dtype}, not in {' or '.join(map(str, TYPES))}"
    if spec.head_size > LARGEST_HEAD:
        return f"its head_size is {spec.head_size}, above {LARGEST_HEAD}"
    return ""
