"""Makes a native backend that of one rank, which has a part of the model."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from secrets import token_hex
from typing import Any

import numpy as np
import torch

from ...config import ParallelConfig
from ...decoding.logits_stage import LogitsStage
from ...errors import ConfigError
from ...layers.recording import NotRecordableError
from ...models.decoder import Stage
from ...models.loading import LoadedModel
from ...models.spec import ModelSpec
from ...parallel.mapping import Place
from ...seams import BackendInfo, MemoryUsage
from ..device.devices import num_gpus
from ..device.running import on_device
from ..forms.compiled.forward import CompiledForward, CompiledHead, check_compiled, record_compiled
from ..forms.form import Forms, NoForm
from ..forms.packed.form import CallsForm, LayersForward, LayersHead
from ..forms.packed.forwards import Forward, Head
from ..forms.table import Asked, attempt, log_forms
from ..operations import Operations
from ..parts import DeviceParts
from ..thread_count import has_openmp
from ..warm_up import warm_up
from .backend import InputTokens, LayersForm, RankBackend, RankForward, on_stage
from .exchange import Exchange, Store
from .staged_model import StagedModel


def device_of_rank(place: Place, config: ParallelConfig, device: torch.device) -> torch.device:
    """Return the device of a rank: the CPU, or the GPU with the number of the local rank in `device_ids`."""
    if device.type == "cpu":
        if config.collectives == "nccl":
            raise ConfigError("ParallelConfig.collectives is 'nccl', and the device is cpu", "NCCL joins GPUs",
                              "leave collectives out")
        return device
    number, count = place.local_rank if config.device_ids is None else config.device_ids[place.local_rank], num_gpus()
    if number >= count:
        raise ConfigError(f"rank {place.rank} has GPU {number}, and this machine has {count}",
                          "each rank of a machine has a GPU of its own",
                          "start fewer ranks on this machine, or correct ParallelConfig.device_ids")
    return torch.device(device.type, number)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPart:
    """The part of a model that this rank has.

    agree     (phase, value) -> the values of all ranks, by rank. Every rank calls it for the same phases in the same
              order
    store     where the ranks make their groups, see `open_store`
    address   address of this machine at which the other ranks reach it
    """

    place: Place
    config: ParallelConfig
    exchange: Exchange
    agree: Callable[[str, Any], list[Any]]
    store: Store
    address: str

    @property
    def stage(self) -> Stage:
        return Stage(self.place.stage, self.place.pipeline_parallel_size)

    def least(self, phase: str, *numbers: int) -> tuple[int, ...]:
        """Return the least value on any rank of each of the numbers."""
        return tuple(min(values) for values in zip(*self.agree(phase, numbers)))

    def make_backend(self, asked: Asked, absent: Mapping[str, str], parts: DeviceParts, loaded: LoadedModel,
                     spec: ModelSpec, sink: int, operations: Operations, make_info: Callable[..., BackendInfo],
                     held: MemoryUsage, own_stages: Sequence[LogitsStage], most_rows: int) -> RankBackend:
        """Connect the ranks, make the backend of this one, and run the warm-up together with the others.

        absent      name -> reason for each form that is not wanted, a result of `wanted_forms`
        spec        the model's spec with the effective windows
        sink        number of sink tokens of the attention
        most_rows   number of rows of the largest call
        Raises      ConfigError; DeviceLostError if another rank fails
        """
        exchange, device = self.exchange, parts.device
        exchange.reserve(most_rows, loaded.spec.hidden_size, loaded.dtype, device)
        engine = self.agree("name of the engine", token_hex(8))[0]
        with on_device(device, parts.stream), torch.inference_mode():
            exchange.connect(self.store, engine, address=self.address, timeout_s=self.config.rank_timeout_s,
                             collectives=self.config.collectives or ("gloo" if device.type == "cpu" else "nccl"))
        model = StagedModel(loaded.model, self.stage, exchange)
        divide, inputs = on_stage(asked.layout, self.stage.is_first), None if self.place.rank == 0 else InputTokens()

        cleared: list[np.ndarray] = []

        def clear(pool_slots: np.ndarray) -> None:
            parts.clear_entries(pool_slots)
            cleared.append(pool_slots)

        def form(name: str, forward: Forward, head: Head, threads: int | None = None) -> CallsForm:
            given = name, parts, model, forward, head, divide
            if inputs is None:
                return CallsForm(*given, threads=threads, clear=clear)
            return LayersForm(inputs, model.splits_head, *given, threads=threads)

        head, absent = LayersHead(model), dict(absent)
        layers = RankForward(LayersForward(model, parts.attention, parts.adapters), exchange, sends=False)
        made = [form("packed", layers, head)]
        with on_device(device, parts.stream), torch.inference_mode(), parts.threads(None)():
            compiled = self._compiled(absent, asked, parts, replace(loaded, model=model), loaded, spec, sink)
        if compiled is not None:
            forward = RankForward(compiled[0], exchange, sends=not self.stage.is_last)
            made.insert(0, form("compiled", forward, compiled[1] or head,
                                threads=1 if has_openmp() and compiled[1] is not None else None))
            if asked.params.deterministic:                 # another form gives other bits
                made.pop()
                absent["packed"] = "deterministic is set, and `compiled` serves every batch"
        forms = Forms(made, parts, absent)
        log_forms(forms)
        # A step is launched when the step before it has been read: the next one's frame has its tokens.
        info = replace(make_info(parts, loaded, forms.dispatch, absent), is_asynchronous=False)
        backend = RankBackend(parts, operations, forms, info, held, divide=asked.layout, exchange=exchange,
                              inputs=inputs, splits_head=model.splits_head, cleared=cleared)
        with on_device(device, parts.stream), torch.inference_mode(), parts.threads(None)():
            warm_up(parts, forms, own_stages, backend.start_alike)
        self.agree("warm-up", None)
        return backend

    def _compiled(self, absent: dict[str, str], asked: Asked, parts: DeviceParts, staged: LoadedModel,
                  loaded: LoadedModel, spec: ModelSpec, sink: int
                  ) -> tuple[CompiledForward, CompiledHead | None] | None:
        """Return the compiled forward and head of this rank's part; None, and a reason in `absent`, if a rank has none.

        staged   the model as it runs among the ranks
        Raises   ConfigError if cpu_compile is True and the model cannot be compiled
        """
        for rank, reason in enumerate(self.agree("compiled steps", absent.get("compiled", ""))):
            if reason:
                absent.setdefault("compiled", f"on rank {rank}, {reason}")

        def make() -> tuple[CompiledForward, CompiledHead | None]:
            made = self._on_all_ranks("recorded forwards", lambda: record_compiled(
                parts, loaded, spec, sink, self.exchange, self.stage.is_last))
            self._on_all_ranks("compared forwards", lambda: check_compiled(parts, staged, made[0]))
            return made
        return attempt(absent, loaded.model, asked.params, "compiled", make)

    def _on_all_ranks(self, phase: str, make: Callable[[], Any]) -> Any:
        """Return the result of `make`, which every rank calls. Raises NoForm if it raises on any rank."""
        made, failed = None, ("", False)
        try:
            made = make()
        except (NotRecordableError, NoForm) as obstacle:
            failed = str(obstacle), getattr(obstacle, "is_wrong", False)
        found = self.agree(phase, failed)
        for rank, (reason, is_wrong) in enumerate(found):
            if reason:
                raise NoForm(failed[0] or f"on rank {rank}, {reason}", is_wrong=is_wrong)
        return made
