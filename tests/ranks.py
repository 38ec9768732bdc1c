"""Several processes on this machine that talk through gloo, as ranks of a training would."""
import multiprocessing
import os
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

PRELOAD = ["facenb.train", "timm"]  # one server has them for the children of all tests


def run_ranks(function, world: int, *arguments) -> list:
    "function(rank, group, *arguments) in `world` processes; what each returned (tensors, numbers, dicts of them)"
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.set_forkserver_preload(PRELOAD)  # once for all ranks of all tests
        mp.start_processes(_rank, (function, world, folder, arguments), nprocs=world, start_method="forkserver")
        return [torch.load(Path(folder) / f"{rank}.pt", weights_only=True) for rank in range(world)]


def _rank(rank: int, function, world: int, folder: str, arguments) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=world)
    try:
        torch.save(function(rank, dist.group.WORLD, *arguments), os.path.join(folder, f"{rank}.pt"))
    finally:
        dist.destroy_process_group()
