"""Two steps of training on two halves of a batch: by two processes, or one after the other by one.

``python two_processes.py RANK FOLDER`` is one of the two, under DistributedDataParallel. It writes
the state of each network to FOLDER.
"""

import copy
import datetime
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

from course_lib import models, optim

STEPS = 2


def networks(layers=torch.nn):
    torch.manual_seed(0)
    return {
        "resnet18_small": models.resnet18_small(3, widths=(4, 4, 8, 8), layers=layers),
        "continuous_integration": models.ContinuousIntegrationModel(3, "medium", 4, layers=layers),
    }


def loss_of(model, rank, step):
    """The loss of half `rank` of a batch of 8, with dropout of its own."""
    random = torch.Generator().manual_seed(step)
    images, labels = torch.randn(8, 3, 8, 8, generator=random), torch.arange(8) % 3
    half = slice(4 * rank, 4 * rank + 4)
    torch.manual_seed(10 * step + rank)
    return F.cross_entropy(model(images[half]), labels[half])


def optimizer_of(model):
    return optim.SGD(model.parameters(), 0.1, momentum=0.9)


def by_one(model):
    """The state after all steps: gradients of both halves averaged, statistics of the first."""
    optimizer = optimizer_of(model)
    for step in range(STEPS):
        beside = copy.deepcopy(model)
        loss_of(model, 0, step).backward()
        loss_of(beside, 1, step).backward()
        for p, other in zip(model.parameters(), beside.parameters(), strict=True):
            p.grad = (p.grad + other.grad) / 2
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def by_two(model, rank):
    parallel, optimizer = DistributedDataParallel(model), optimizer_of(model)
    for step in range(STEPS):
        loss_of(parallel, rank, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


if __name__ == "__main__":
    rank, folder = int(sys.argv[1]), Path(sys.argv[2]).resolve()
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2,
        timeout=datetime.timedelta(seconds=250),
    )  # fmt: skip
    found = {name: by_two(model, rank) for name, model in networks().items()}
    torch.save(found, folder / f"{rank}.pt")
    torch.distributed.destroy_process_group()
