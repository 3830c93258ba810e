"""Adapters of the tests: contents that stand for a task id, and tensors that a request may bring along."""

from hashlib import sha256

import numpy as np

from batch_manager.adapter_values import MODULE_NAMES, AdapterContent
from batch_manager.requests.adapter_content import checked_adapter, read_adapter
from batch_manager.testing.scripted_backend import ADAPTER_MODULES


def adapter_of(task_id: int | None, num_pages: int = 1, num_bytes: int = 0) -> AdapterContent | None:
    """Return a content without parts whose digest is that of the task id; None for None."""
    if task_id is None:
        return None
    return AdapterContent(sha256(str(task_id).encode()).digest(), "float32", (), num_bytes, num_pages)


def adapter_tensors(seed: int, rank: int = 1, dtype: type = np.float32) -> dict[str, np.ndarray]:
    """Return the tensors of an adapter of all modules of a ScriptedBackend. The seed decides the weights."""
    rows = [(MODULE_NAMES.index(name), layer, rank) for name, layers in ADAPTER_MODULES.sizes.items()
            for layer, size in enumerate(layers) if size is not None]
    widest = rank * ADAPTER_MODULES.largest_row
    weights = np.random.default_rng(seed).standard_normal((len(rows), widest)).astype(dtype)
    return {"lora_weights": weights, "lora_config": np.array(rows, np.int32)}


def content_of(tensors: dict[str, np.ndarray]) -> AdapterContent:
    """Return the content of tensors for a ScriptedBackend."""
    return checked_adapter(read_adapter(tensors, 1 << 30), ADAPTER_MODULES, 1024)
