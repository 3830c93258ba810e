"""LoRA adapters of an engine by name. A name stands for a task id, and a task id is never given twice."""

import os
import threading
from collections import Counter
from collections.abc import Mapping
from typing import Any, Protocol

from ..adapter_values import AdapterInfo
from ..contained_log import log
from ..errors import BatchManagerError, ConfigError, InvalidRequestError
from ..thread_stack import start_with_enough_stack

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
        self._loading = Counter[str]()                   # name -> number of loads now
        self._users = Counter[int]()                     # task id -> leases
        self._retired: set[int] = set()                  # task ids without a name, to forget with their last lease
        self._num_ids = 0

    @property
    def infos(self) -> dict[str, AdapterInfo]:
        """Name -> facts of the adapter, in the order of loading."""
        with self._lock:
            return dict(self._infos)

    def task_id_of(self, name: str) -> int | None:
        """Return the task id of an adapter; None: there is none of this name."""
        info = self._infos.get(name)
        return None if info is None else info.task_id

    def lease(self, name: str) -> "Lease | None":
        """Return a lease of an adapter for a request; None: there is none of this name.

        The task id stays known until the lease ends, also if the name is unloaded or replaced before the worker has
        read the request.
        """
        with self._lock:
            info = self._infos.get(name)
            if info is None:
                return None
            self._users[info.task_id] += 1
        return Lease(self, info.task_id)

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
            if not replaces and (name in self._loading or name in self._infos):
                raise NameInUseError(f"the adapter name {name!r} is in use", "a name stands for one adapter",
                                     "unload that adapter first, or choose another name")
            self._loading[name] += 1
        try:
            info = self._loaded(name, adapter)
            with self._lock:
                before = self._infos.get(name)
                if before is None or before.task_id < info.task_id:      # of several loads, the last begun wins
                    self._infos[name] = info
                else:
                    before = info
        finally:
            with self._lock:
                self._loading[name] -= 1
                self._loading += Counter()                               # drops names that nothing loads
        if before is not None:
            self._retire(before.task_id)
        return info

    def _loaded(self, name: str, adapter: str | os.PathLike[str] | Mapping[str, Any]) -> AdapterInfo:
        """Load an adapter under the next id. An id under which a request brought another adapter is passed over."""
        while True:
            with self._lock:
                task_id = FIRST_TASK_ID + self._num_ids
                self._num_ids += 1
                self._names[task_id] = name
            try:
                return self._manager.load_adapter(task_id, adapter)
            except InvalidRequestError as error:
                if not error.fact.startswith(f"LoRA task {task_id} "):    # the fact of an id that is taken
                    raise
                del self._names[task_id]

    def unload(self, name: str) -> None:
        """Unload an adapter. Requests that have it go on. Raises ConfigError if there is none of this name."""
        with self._lock:
            info = self._infos.pop(name, None)
        if info is None:
            raise ConfigError(f"there is no adapter {name!r}"[:200], "expected a name that `adapters` has", "")
        self._retire(info.task_id)

    def _retire(self, task_id: int) -> None:
        """Forget an adapter without a name, with the last of its leases."""
        with self._lock:
            if self._users[task_id]:
                self._retired.add(task_id)
                return
        self._manager.forget_adapter(task_id)

    def end_lease(self, task_id: int) -> None:
        """Count a lease no longer. Called by Lease, on a thread that must not wait for the engine."""
        with self._lock:
            self._users[task_id] -= 1
            self._users += Counter()
            if self._users[task_id] or task_id not in self._retired:
                return
            self._retired.remove(task_id)
        start_with_enough_stack(threading.Thread(target=self._forget, args=(task_id,), daemon=True,
                                                 name="batch_manager forgets an adapter"))

    def _forget(self, task_id: int) -> None:
        try:
            self._manager.forget_adapter(task_id)
        except BatchManagerError as error:               # the engine has ended
            log.debug("an adapter was not forgotten: %s", error)


class Lease:
    """The use of an adapter by one request, until `end`, which may be called twice."""

    __slots__ = ("_names", "task_id")

    def __init__(self, names: AdapterNames, task_id: int) -> None:
        self._names: AdapterNames | None = names
        self.task_id = task_id

    def end(self) -> None:
        names, self._names = self._names, None
        if names is not None:
            names.end_lease(self.task_id)


class NameInUseError(ConfigError):
    """The name stands for another adapter."""
