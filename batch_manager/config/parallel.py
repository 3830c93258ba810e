"""One model over several processes."""

from dataclasses import dataclass
from typing import Any

from ..errors import ConfigError
from ..option_values import exact_integer, put_count, put_seconds

COLLECTIVES = ("nccl", "gloo")
MAX_RANKS = 1024              # of each kind of parallelism


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelConfig:
    """One model over several processes, its ranks, each with an engine of its own. Every rank constructs its engine
    with equal arguments; only `rank`, `local_rank` and `device_ids` may differ.

    tensor_parallel_size     ranks that share each layer
    pipeline_parallel_size   stages, each with a part of the layers. The product of both sizes is the number of ranks
    rank, local_rank         number of this process among all ranks and among those of its machine, from 0; None: from
                             the variables of the launcher (torchrun, mpirun, srun). With a rank, these variables are
                             not read, and a local_rank of None is the rank
    leader                   "host:port" at which the ranks meet, on the machine of rank 0; None:
                             $MASTER_ADDR:$MASTER_PORT
    device_ids               number of the GPU of each local rank; None: the local rank is that number. With one rank,
                             `device` names the GPU
    collectives              "nccl" or "gloo"; None: "nccl" on GPUs, "gloo" on CPUs
    rank_timeout_s           a rank that is silent for this many seconds counts as lost, and the engine ends
    connect_timeout_s        seconds within which all ranks must have come up
    """

    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    rank: int | None = None
    local_rank: int | None = None
    leader: str | None = None
    device_ids: tuple[int, ...] | None = None
    collectives: str | None = None
    rank_timeout_s: float = 60
    connect_timeout_s: float = 300

    def __post_init__(self) -> None:
        owner = "ParallelConfig."
        for name in ("tensor_parallel_size", "pipeline_parallel_size"):
            put_count(self, name, maximum=MAX_RANKS, owner=owner)
        for name in ("rank", "local_rank"):
            put_count(self, name, minimum=0, maximum=MAX_RANKS**2, optional=True, owner=owner)
        if self.rank is not None and self.rank >= self.num_ranks:
            raise ConfigError(f"{owner}rank is {self.rank}", f"expected a rank in 0..{self.num_ranks - 1}, because "
                              f"{self.sizes}", "correct the rank or the sizes")
        if self.leader is not None:
            address_of(self.leader, f"{owner}leader")
        if self.device_ids is not None:
            numbers = ([exact_integer(number) for number in self.device_ids]
                       if isinstance(self.device_ids, list | tuple) else [])
            if not numbers or any(number is None or number < 0 for number in numbers):
                raise ConfigError(f"{owner}device_ids is {self.device_ids!r}",
                                  "expected the number of a GPU, from 0, for each rank of a machine, or None",
                                  "pass a list like [0, 1]")
            object.__setattr__(self, "device_ids", tuple(numbers))
        if self.collectives is not None and self.collectives not in COLLECTIVES:
            raise ConfigError(f"{owner}collectives is {self.collectives!r}",
                              f"expected one of {', '.join(COLLECTIVES)}, or None", "leave it out")
        for name in ("rank_timeout_s", "connect_timeout_s"):
            put_seconds(self, name, positive=True, owner=owner)

    @property
    def num_ranks(self) -> int:
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def sizes(self) -> str:
        """Both sizes in words, for errors."""
        return (f"tensor_parallel_size is {self.tensor_parallel_size} and pipeline_parallel_size is "
                f"{self.pipeline_parallel_size}")


def address_of(text: Any, name: str) -> tuple[str, int]:
    """Return host and port of "host:port"; an IPv6 address is in brackets. Raises ConfigError."""
    host, _, port = text.rpartition(":") if isinstance(text, str) else ("", "", "")
    host = host[1:-1] if host.startswith("[") and host.endswith("]") else "" if ":" in host else host
    if not host or not (port.isascii() and port.isdigit()) or not 1 <= int(port[:9]) <= 65535:
        raise ConfigError(f"{name} is {text!r}", "expected host:port with a port in 1..65535",
                          'pass for instance "10.0.0.1:29500", or "127.0.0.1:29500" on one machine')
    return host, int(port)
