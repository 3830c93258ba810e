"""Makes a native backend that of one rank, which has a part of the model."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from secrets import token_hex
from typing import Any

import torch

from ...config import ParallelConfig
from ...decoding.logits_stage import LogitsStage
from ...errors import ConfigError
from ...models.decoder import Stage
from ...models.loading import LoadedModel
from ...parallel.mapping import Place
from ...seams import BackendInfo, MemoryUsage
from ..device.devices import num_gpus
from ..device.running import on_device
from ..forms.form import Forms
from ..forms.packed.form import CallsForm, LayersHead
from ..forms.table import log_forms
from ..operations import Operations
from ..packing import Divide
from ..parts import DeviceParts
from ..warm_up import warm_up
from .backend import InputTokens, LayersForm, RankBackend, RankForward, on_stage
from .exchange import Exchange, Store
from .staged_model import StagedModel


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

    def device_among(self, device: torch.device) -> torch.device:
        """Return the device of this rank: the CPU, or the GPU with the number of the local rank in `device_ids`."""
        config, local_rank = self.config, self.place.local_rank
        if device.type == "cpu":
            if config.collectives == "nccl":
                raise ConfigError("ParallelConfig.collectives is 'nccl', and the device is cpu", "NCCL joins GPUs",
                                  "leave collectives out")
            return device
        number, count = local_rank if config.device_ids is None else config.device_ids[local_rank], num_gpus()
        if number >= count:
            raise ConfigError(f"rank {self.place.rank} has GPU {number}, and this machine has {count}",
                              "each rank of a machine has a GPU of its own",
                              "start fewer ranks on this machine, or correct ParallelConfig.device_ids")
        return torch.device(device.type, number)

    def least(self, phase: str, *numbers: int) -> tuple[int, ...]:
        """Return the least value on any rank of each of the numbers."""
        return tuple(min(values) for values in zip(*self.agree(phase, numbers)))

    def make_backend(self, parts: DeviceParts, loaded: LoadedModel, operations: Operations, absent: Mapping[str, str],
                     make_info: Callable[..., BackendInfo], held: MemoryUsage, own_stages: Sequence[LogitsStage],
                     layout: Divide, most_rows: int) -> RankBackend:
        """Connect the ranks, make the backend of this one, and run the warm-up together with the others.

        layout      a function of packing.py, which divides a step into calls of the model
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
        divide, draws = on_stage(layout, self.stage.is_first), self.place.rank == 0
        inputs = None if draws else InputTokens()
        forward = RankForward(model, parts.attention, parts.adapters, exchange)
        given = "packed", parts, model, forward, LayersHead(model), divide
        forms = Forms([CallsForm(*given) if draws else LayersForm(inputs, model.splits_head, *given)], parts, absent)
        log_forms(forms)
        # A step is launched when the step before it has been read: the next one's frame has its tokens.
        info = replace(make_info(parts, loaded, forms.dispatch, absent), is_asynchronous=False, max_draft_tokens=0)
        backend = RankBackend(parts, operations, forms, info, held, divide=layout, exchange=exchange, inputs=inputs,
                              splits_head=model.splits_head)
        with on_device(device, parts.stream), torch.inference_mode(), parts.threads(None)():
            warm_up(parts, forms, own_stages, backend.start_alike)
        self.agree("warm-up", None)
        return backend
