"""An eager PyTorch script that trains the Fashion-MNIST network as the course's command does.

    python fashion_mnist_eager.py IMAGES OUTPUT PRECISION EPOCHS BATCH_SIZE DEVICE

`benchmarks.fashion_mnist_command` times it.
"""

import functools
import json
import math
import os
import sys
from pathlib import Path

import torch
import torch.nn.functional as F

from course_lib import data, models

PEAK, MOMENTUM, WEIGHT_DECAY, WARM_UP = 0.05, 0.9, 5e-4, 0.1


def main(images, output, precision, epochs, batch_size, device):
    """Train, and print a line for each epoch."""
    epochs, batch_size, output = int(epochs), int(batch_size), Path(output)
    output.mkdir()
    torch.backends.cudnn.benchmark = True
    allowed = precision == "tf32"
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = allowed
    (x, y), (test_x, test_y) = (
        [part.to(device) for part in data.fashion_mnist(images, train=train)]
        for train in (True, False)
    )
    torch.manual_seed(0)
    model = models.FashionMNISTCNN(layers=torch.nn).to(device)
    optimizer = torch.optim.SGD(
        [
            {"params": [p for p in model.parameters() if p.dim() > 1]},
            {"params": [p for p in model.parameters() if p.dim() <= 1], "weight_decay": 0.0},
        ],
        lr=PEAK, momentum=MOMENTUM, nesterov=True, weight_decay=WEIGHT_DECAY, fused=True,
    )  # fmt: skip
    steps = len(x) // batch_size
    total = epochs * steps
    rise, history = max(1, round(WARM_UP * total)), []
    for epoch in range(epochs):
        order, sums = torch.randperm(len(x), device=device), torch.zeros(2, device=device)
        for step in range(steps):
            rows = order[step * batch_size :][:batch_size]
            rate = _rate(epoch * steps + step, rise, total)
            for group in optimizer.param_groups:
                group["lr"] = rate
            labels = y[rows]
            logits = model(_scaled(x[rows]))
            loss = F.cross_entropy(logits, labels)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            with torch.no_grad():
                sums += torch.stack([loss, (logits.argmax(1) == labels).sum()])
        loss, right = sums.tolist()
        found = _evaluated(model, test_x, test_y)
        history.append({"loss": loss / steps, "accuracy": right / (steps * batch_size)} | found)
        print(f"epoch {epoch + 1}: {history[-1]}", flush=True)
        kept = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
        _save(output / "checkpoint.pt", functools.partial(torch.save, kept))
        text = json.dumps(history).encode()
        _save(output / "history.json", functools.partial(_write, text))


def _rate(step, rise, total):
    if step < rise:
        return PEAK * (step + 1) / rise
    return PEAK * (1 + math.cos(math.pi * (step - rise) / (total - rise))) / 2


def _scaled(images):
    return images[:, None].float() / 127.5 - 1


@torch.no_grad()
def _evaluated(model, images, labels):
    logits = torch.cat([model(_scaled(part)) for part in images.split(1000)])
    right = (logits.argmax(1) == labels).float().mean().item()
    return {
        "validation_loss": F.cross_entropy(logits, labels).item(),
        "validation_accuracy": right,
    }


def _write(text, file):
    file.write(text)


def _save(path, write):
    """Write a file as the command does: whole, and on the disk."""
    part = path.with_suffix(".part")
    with open(part, "wb") as file:
        write(file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(part, path)


if __name__ == "__main__":
    main(*sys.argv[1:])
