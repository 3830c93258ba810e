"""The place of a process among the ranks: from arguments, or from the variables of a launcher."""

import pytest

from batch_manager import ConfigError, ParallelConfig
from batch_manager.parallel.mapping import LAUNCHERS, Place, is_launched, place_of

ADDRESS = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
TORCHRUN = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", **ADDRESS}
OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "0",
            "OMPI_COMM_WORLD_LOCAL_SIZE": "1", **ADDRESS}
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "1", **ADDRESS}
SLURM = {"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_LOCALID": "0", "SLURM_NODEID": "1",
         "SLURM_STEP_TASKS_PER_NODE": "1(x2)", **ADDRESS}


def place(environment, **options):
    return place_of(ParallelConfig(**{"tensor_parallel_size": 2, **options}), environment)


@pytest.mark.parametrize("environment, local_rank, local_size", [
    (TORCHRUN, 1, 2), (OPEN_MPI, 0, 1), (MPICH, 0, 1), (SLURM, 0, 1)], ids=[row.name for row in LAUNCHERS])
def test_a_launcher_tells_rank_and_address(environment, local_rank, local_size):
    assert place(environment) == Place(rank=1, tensor_parallel_size=2, pipeline_parallel_size=1, local_rank=local_rank,
                                       local_size=local_size, host="10.0.0.1", port=29500)


def test_a_rank_as_an_argument_needs_no_launcher_and_overrides_one():
    found = place({"SLURM_PROCID": "nonsense", "SLURM_NTASKS": "7"}, rank=0, leader="[::1]:80")
    assert (found.rank, found.local_rank, found.local_size, found.host, found.port) == (0, 0, 2, "::1", 80)
    assert place(TORCHRUN, rank=0).rank == 0 and place(TORCHRUN, local_rank=0).local_rank == 0


def test_the_store_of_torchrun_is_used_where_it_is():
    environment = {**TORCHRUN, "TORCHELASTIC_USE_AGENT_STORE": "True"}
    assert place(environment).has_agent_store
    assert not place(environment, leader="10.0.0.1:1").has_agent_store
    assert not place({**OPEN_MPI, "TORCHELASTIC_USE_AGENT_STORE": "True"}).has_agent_store
    assert place({**TORCHRUN, "MASTER_ADDR": "fe80::1"}).host == "fe80::1"


def test_a_launcher_with_another_number_of_processes_is_the_outer_one():
    """srun starts torchrun once on each machine."""
    outer = {"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_LOCALID": "0"}
    assert place({**TORCHRUN, **outer}).rank == 1
    script = {**outer, "SLURM_NTASKS": "2", "SLURM_JOB_ID": "7"}     # sbatch -n 2, whose script calls torchrun
    assert place({**TORCHRUN, **script}).rank == 1
    assert not is_launched(ParallelConfig(tensor_parallel_size=2), script)
    assert is_launched(ParallelConfig(tensor_parallel_size=2), {**script, "SLURM_STEP_ID": "0"})


def test_ranks_are_numbered_from_the_last_stage():
    places = [place({}, rank=rank, pipeline_parallel_size=2, leader="h:1") for rank in range(4)]
    assert [(found.stage, found.tensor_rank) for found in places] == [(1, 0), (1, 1), (0, 0), (0, 1)]
    assert {found.num_ranks for found in places} == {4}


@pytest.mark.parametrize("tasks, node, size", [("2(x3),1", 3, 1), ("2(x3),1", 0, 2), ("4", 0, 4), ("", 0, 2),
                                               ("1", 5, 2)])
def test_slurm_counts_the_tasks_of_each_machine(tasks, node, size):
    environment = {**SLURM, "SLURM_STEP_TASKS_PER_NODE": tasks, "SLURM_NODEID": str(node)}
    assert place(environment).local_size == size


@pytest.mark.parametrize("environment, options, says", [
    ({}, {}, ("parallel_config has 2 ranks", "RANK and WORLD_SIZE (torchrun)", "torchrun --nproc-per-node 2")),
    ({**TORCHRUN, "WORLD_SIZE": "4"}, {}, ("WORLD_SIZE is 4", "expected 2, because tensor_parallel_size is 2 and "
                                          "pipeline_parallel_size is 1", "start 2 processes")),
    ({**SLURM, "SLURM_NTASKS": "3", **TORCHRUN, "WORLD_SIZE": "4"}, {}, ("WORLD_SIZE is 4 and SLURM_NTASKS is 3",)),
    ({**TORCHRUN, "RANK": "2"}, {}, ("RANK is 2 and WORLD_SIZE is 2", "expected 0..1")),
    ({**TORCHRUN, **OPEN_MPI, "RANK": "0"}, {}, ("RANK is 0 and OMPI_COMM_WORLD_RANK is 1", "expected one rank",
                                                "unset OMPI_COMM_WORLD_RANK")),
    ({**TORCHRUN, "RANK": "one"}, {}, ("RANK is 'one'", "expected a number from 0", "unset RANK")),
    ({**TORCHRUN, "WORLD_SIZE": "-2"}, {}, ("WORLD_SIZE is '-2'",)),
    ({**TORCHRUN, "LOCAL_RANK": "2"}, {}, ("the local rank is 2, and this machine has 2 ranks", "expected 0..1")),
    ({}, {"rank": 0, "local_rank": 2, "leader": "h:1"}, ("the local rank is 2",)),
    (TORCHRUN, {"device_ids": [3]}, ("device_ids is [3]", "this machine has 2 ranks", "pass one for each")),
    ({}, {"rank": 0}, ("neither ParallelConfig.leader nor both of MASTER_ADDR and MASTER_PORT", "rank 0",
                       'leader="127.0.0.1:29500"')),
    ({**OPEN_MPI, "MASTER_PORT": ""}, {}, ("neither ParallelConfig.leader",)),
    ({**TORCHRUN, "MASTER_PORT": "70000"}, {}, ("MASTER_ADDR:MASTER_PORT is '[10.0.0.1]:70000'", "1..65535")),
])
def test_what_contradicts_itself_is_refused_with_names_values_and_a_way_out(environment, options, says):
    with pytest.raises(ConfigError) as raised:
        place(environment, **options)
    text = str(raised.value)
    assert all(part in text for part in says), text
    assert text.count("; ") >= 2
