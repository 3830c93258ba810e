"""The memory for LoRA adapters."""

from dataclasses import dataclass
from os import PathLike

from ..adapter_values import LARGEST_ADAPTER_SIZE, MODULE_NAMES
from ..errors import ConfigError
from ..option_values import exact_number, put_count, shown_option


@dataclass(frozen=True, slots=True, kw_only=True)
class PeftCacheConfig:
    """The memory for LoRA adapters, on the host and on the device.

    host_cache_size          bytes of host memory for the adapters that the engine knows
    device_cache_percent     share of the free device memory, 0 < x < 1, for adapters of running requests. Free memory
                             is what the weights leave
    num_host_module_layer    size of the host memory as a number of projections of rank 1, counted in every layer; 0:
                             host_cache_size decides
    num_device_module_layer  likewise for the device; 0: device_cache_percent decides
    max_adapter_size         largest rank of an adapter
    lora_modules             names of the modules that adapters may change, from batch_manager.MODULE_NAMES; None: all
                             that the model has
    lora_prefetch_dir        folder of adapters that are loaded at the start, in subfolders named by their task ids
    """

    host_cache_size: int = 1 << 30
    device_cache_percent: float = 0.02
    num_host_module_layer: int = 0
    num_device_module_layer: int = 0
    max_adapter_size: int = 64
    lora_modules: tuple[str, ...] | None = None
    lora_prefetch_dir: str | PathLike[str] | None = None

    def __post_init__(self) -> None:
        put_count(self, "host_cache_size", owner="PeftCacheConfig.")
        put_count(self, "max_adapter_size", maximum=LARGEST_ADAPTER_SIZE, owner="PeftCacheConfig.")
        for name in ("num_host_module_layer", "num_device_module_layer"):
            put_count(self, name, minimum=0, owner="PeftCacheConfig.")
        share = exact_number(self.device_cache_percent)
        if share is None or not 0 < share < 1:
            raise ConfigError(f"PeftCacheConfig.device_cache_percent is {shown_option(self.device_cache_percent)}",
                              "it must be in (0, 1): the KV cache has the rest", "0.02 is the default")
        object.__setattr__(self, "device_cache_percent", share)
        names = self.lora_modules
        if names is not None:
            if not isinstance(names, list | tuple) or not names or not set(map(str, names)) <= set(MODULE_NAMES):
                raise ConfigError(f"PeftCacheConfig.lora_modules is {names!r}"[:200],
                                  f"expected a list of names from {', '.join(MODULE_NAMES)}", "leave it None for all")
            object.__setattr__(self, "lora_modules", tuple(names))
        folder = self.lora_prefetch_dir
        if folder is not None and not isinstance(folder, str | PathLike):
            raise ConfigError(f"PeftCacheConfig.lora_prefetch_dir is of type {type(folder).__name__}",
                              "expected a path, or None", "leave it None to load no adapters at the start")
