"""LoRA adapters of an engine by name. A name stands for a task id, and a task id is never given twice."""

import os
import threading
from collections.abc import Mapping
from typing import Any, Protocol

from ..adapter_values import AdapterInfo
from ..errors import ConfigError

FIRST_TASK_ID = 2**63        # the ids below are the host program's own


class LoadsAdapters(Protocol):
    """The methods of a GptManager that load adapters."""

    def load_adapter(self, task_id: int, adapter: str | os.PathLike[str] | Mapping[str, Any]) -> AdapterInfo: ...

    def forget_adapter(self, task_id: int) -> bool: ...


class AdapterNames:
    """The names of the adapters that an engine has loaded. All methods may be called from any thread."""

    def __init__(self, manager: LoadsAdapters) -> None:
        self._manager = manager
        self._lock = threading.Lock()                  # held for the change of the names, never while something loads
        self._infos: dict[str, AdapterInfo] = {}
        self._names: dict[int, str] = {}               # also of adapters that were replaced or unloaded
        self._loading: set[str] = set()

    @property
    def infos(self) -> dict[str, AdapterInfo]:
        """Name -> facts of the adapter, in the order of loading."""
        with self._lock:
            return dict(self._infos)

    def task_id_of(self, name: str) -> int | None:
        """Return the task id of an adapter; None: there is none of this name."""
        info = self._infos.get(name)
        return None if info is None else info.task_id

    def name_of(self, task_id: int) -> str | None:
        """Return the name under which an adapter was loaded, also if it is unloaded while requests still use it."""
        return self._names.get(task_id)

    def load(self, name: str, adapter: str | os.PathLike[str] | Mapping[str, Any], replaces: bool) -> AdapterInfo:
        """Load an adapter under a name.

        replaces   whether the name may be in use. Its adapter then gives way once the new one is loaded: requests that
                   have it go on with it

        Raises ConfigError if the name is in use, or is empty; and the errors of GptManager.load_adapter.
        """
        if not isinstance(name, str) or not name:
            raise ConfigError(f"the name of an adapter is {name!r}"[:200], "expected a non-empty string", "pass a name")
        with self._lock:
            if name in self._loading or name in self._infos and not replaces:
                raise NameInUseError(f"the adapter name {name!r} is in use", "a name stands for one adapter",
                                     "unload that adapter first, or choose another name")
            self._loading.add(name)
            task_id = FIRST_TASK_ID + len(self._names)
            self._names[task_id] = name
        try:
            info = self._manager.load_adapter(task_id, adapter)
            with self._lock:
                before = self._infos.get(name)
                self._infos[name] = info
        finally:
            self._loading.discard(name)
        if before is not None:
            self._manager.forget_adapter(before.task_id)
        return info

    def unload(self, name: str) -> None:
        """Unload an adapter. Requests that have it go on. Raises ConfigError if there is none of this name."""
        with self._lock:
            info = self._infos.pop(name, None)
        if info is None:
            raise ConfigError(f"there is no adapter {name!r}"[:200], "expected a name that `adapters` has", "")
        self._manager.forget_adapter(info.task_id)


class NameInUseError(ConfigError):
    """The name stands for another adapter."""
