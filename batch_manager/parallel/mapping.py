"""Which rank this process is, and where the ranks meet: from a ParallelConfig or the variables of a launcher."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from ..config import ParallelConfig, address_of
from ..errors import ConfigError, counted


@dataclass(frozen=True, slots=True)
class _Launcher:
    """The variables that a launcher sets for each of its processes.

    size, local_size   number of processes, and of those on this machine
    """

    name: str
    rank: str
    size: str
    local_rank: str
    local_size: str


TORCHRUN = _Launcher("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
SLURM = _Launcher("Slurm", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE")
LAUNCHERS = (
    TORCHRUN,
    _Launcher("Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
              "OMPI_COMM_WORLD_LOCAL_SIZE"),
    _Launcher("MPICH or Intel MPI", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    SLURM,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """This process among the ranks.

    local_rank, local_size   its number among the ranks of its machine, and how many there are. Without a launcher that
                             tells them: the rank, and all ranks
    host, port               where the ranks meet
    has_agent_store          torchrun runs the store there, so that rank 0 must not
    """

    rank: int
    tensor_parallel_size: int
    pipeline_parallel_size: int
    local_rank: int
    local_size: int
    host: str
    port: int
    has_agent_store: bool = False

    @property
    def num_ranks(self) -> int:
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def stage(self) -> int:
        """The part of the layers. Rank 0 is of the last stage: it has the callbacks, so it draws the tokens."""
        return self.pipeline_parallel_size - 1 - self.rank // self.tensor_parallel_size

    @property
    def tensor_rank(self) -> int:
        """The part of each layer."""
        return self.rank % self.tensor_parallel_size


def place_of(config: ParallelConfig, environment: Mapping[str, str] = os.environ) -> Place:
    """Return the place of this process.

    Raises ConfigError if no launcher tells it, if launchers contradict each other or the sizes, and without an address.
    """
    launcher, rank, local_rank, local_size = None, config.rank, config.local_rank, config.num_ranks
    if rank is None:
        launcher, rank = _launched(config, environment)
        told = _number(environment, launcher.local_rank)
        local_rank = told if local_rank is None else local_rank
        local_size = _local_size(environment, launcher) or local_size
    local_rank = rank if local_rank is None else local_rank
    if local_rank >= local_size:
        raise ConfigError(f"the local rank is {local_rank}, and this machine has {counted(local_size, 'rank')}",
                          f"expected 0..{local_size - 1}", "correct ParallelConfig.local_rank, or leave it out")
    if config.device_ids is not None and len(config.device_ids) < local_size:
        raise ConfigError(f"ParallelConfig.device_ids is {list(config.device_ids)}",
                          f"this machine has {counted(local_size, 'rank')}, and each needs the number of a GPU",
                          "pass one for each, or leave device_ids out")
    address, port = environment.get("MASTER_ADDR"), environment.get("MASTER_PORT")
    if config.leader is not None:
        host, number = address_of(config.leader, "ParallelConfig.leader")
    elif address and port:
        host, number = address_of(f"[{address}]:{port}", "MASTER_ADDR:MASTER_PORT")
    else:
        raise ConfigError("neither ParallelConfig.leader nor both of MASTER_ADDR and MASTER_PORT are set",
                          "expected the address at which the ranks meet, on the machine of rank 0",
                          'pass for instance leader="127.0.0.1:29500" if all ranks are on one machine')
    has_store = (config.leader is None and launcher is TORCHRUN
                 and environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True")
    return Place(rank=rank, tensor_parallel_size=config.tensor_parallel_size,
                 pipeline_parallel_size=config.pipeline_parallel_size, local_rank=local_rank, local_size=local_size,
                 host=host, port=number, has_agent_store=has_store)


def is_launched(config: ParallelConfig, environment: Mapping[str, str] = os.environ) -> bool:
    """Whether this process is one of the ranks already, by its arguments or its launcher. Raises ConfigError."""
    return config.rank is not None or TORCHRUN.rank in environment or bool(_fitting(config, environment)[0])


def _launched(config: ParallelConfig, environment: Mapping[str, str]) -> tuple[_Launcher, int]:
    """Return the launcher whose number of processes is the number of ranks, and the rank.

    A launcher with another number is the outer one of two, such as the srun that started torchrun on each machine.
    """
    fitting, others = _fitting(config, environment)
    if not fitting and others:
        raise ConfigError(" and ".join(others), f"expected {config.num_ranks}, because {config.sizes}",
                          f"start {counted(config.num_ranks, 'process', 'processes')}, or correct the sizes")
    if not fitting:
        raise ConfigError(f"parallel_config has {config.num_ranks} ranks, and no launcher tells which one this process "
                          "is", "expected " + ", ".join(f"{launcher.rank} and {launcher.size} "
                                                        f"({launcher.name})" for launcher in LAUNCHERS),
                          f"start the program with torchrun --nproc-per-node {config.num_ranks}, or pass "
                          "ParallelConfig(rank=, leader=)")
    if len({rank for _, rank in fitting}) > 1:
        raise ConfigError(" and ".join(f"{launcher.rank} is {rank}" for launcher, rank in fitting),
                          f"expected one rank, because each launcher has {config.num_ranks} processes",
                          f"unset {fitting[-1][0].rank}, or pass ParallelConfig(rank=, leader=)")
    return fitting[0]


def _fitting(config: ParallelConfig, environment: Mapping[str, str]) -> tuple[list[tuple[_Launcher, int]], list[str]]:
    """Return the launchers with the right number of processes, each with the rank, and the sizes of the others."""
    fitting, others = [], []
    for launcher in LAUNCHERS:
        if launcher is SLURM and "SLURM_JOB_ID" in environment and "SLURM_STEP_ID" not in environment:
            continue                                   # the script of a job itself, which srun did not start
        rank, size = _number(environment, launcher.rank), _number(environment, launcher.size)
        if rank is None or size is None:
            continue
        if size != config.num_ranks:
            others.append(f"{launcher.size} is {size}")
        elif rank >= size:
            raise ConfigError(f"{launcher.rank} is {rank} and {launcher.size} is {size}", f"expected 0..{size - 1}",
                              f"correct the environment of {launcher.name}")
        else:
            fitting.append((launcher, rank))
    return fitting, others


def _local_size(environment: Mapping[str, str], launcher: _Launcher) -> int | None:
    if launcher is not SLURM:
        return _number(environment, launcher.local_size)
    counts: list[int] = []    # 2(x3),1: three machines with two tasks each, then one with one
    for count, times in re.findall(r"(\d{1,6})(?:\(x(\d{1,6})\))?", environment.get(SLURM.local_size, "")):
        counts += [int(count)] * int(times or 1)
    node = _number(environment, "SLURM_NODEID") or 0
    return counts[node] if node < len(counts) else None


def _number(environment: Mapping[str, str], name: str) -> int | None:
    """Return the number in a variable, None if it is not set. Raises ConfigError if it is none."""
    text = environment.get(name)
    if not text:
        return None
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise ConfigError(f"{name} is {text!r}", "expected a number from 0", f"unset {name}, or correct it")
    return int(text)
