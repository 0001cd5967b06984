"""The processes of a distributed test, in place of a module of Transformers' tests that its source archive lacks."""

import multiprocessing
import os
import socket

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

# A server imports everything once and makes the processes from then on.
multiprocessing.set_forkserver_preload([f"{__package__}.test_common_models"])


def _get_distributed_backend() -> str:
    return "gloo"


def _get_distributed_device_type() -> str:
    return "cpu"


def _get_rank_device(rank: int) -> torch.device:
    return torch.device("cpu")


def _set_rank_device(rank: int) -> None: ...


def _start_rank_processes(function, args: tuple, nprocs: int) -> None:
    mp.start_processes(function, args=args, nprocs=nprocs, start_method="forkserver")


def run_distributed(world_size: int):
    """Decorate a function of a rank and further arguments: it runs in as many processes, one for each rank."""

    def decorate(function):
        def run(*args, **kwargs):
            _start_rank_processes(_run_rank, (function, world_size, _free_port(), args, kwargs), world_size)

        return run

    return decorate


def _free_port() -> int:
    with socket.socket() as server:
        server.bind(("localhost", 0))
        return server.getsockname()[1]


def _run_rank(rank: int, function, world_size: int, port: int, args: tuple, kwargs: dict) -> None:
    os.environ.update(RANK=f"{rank}", LOCAL_RANK=f"{rank}", WORLD_SIZE=f"{world_size}")
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=f"{port}")
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    function(rank, *args, **kwargs)
    dist.barrier()
    dist.destroy_process_group()
