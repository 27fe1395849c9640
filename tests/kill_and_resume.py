"""Kill a training run with SIGKILL at random moments, and compare it with one left alone.

    python tests/kill_and_resume.py FOLDER --kills 3 -- --model efficientnet_b0 --epochs 4

trains `leaves`, or what ``--task`` names, twice with the options after ``--``: once undisturbed
into FOLDER/whole, once into FOLDER/killed, where it is killed and resumed. The two must end with
the same bits.
"""

import argparse
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch


def differences(one, other):
    """Where two checkpoints differ, as paths into them; tensors are compared bit by bit."""
    one, other = (torch.load(path, map_location="cpu", weights_only=True) for path in (one, other))
    return list(_differences(one, other, "checkpoint"))


def _differences(one, other, place):
    if type(one) is not type(other):
        yield place
    elif isinstance(one, dict):
        if one.keys() != other.keys():
            yield place
        for key in one.keys() & other.keys():
            yield from _differences(one[key], other[key], f"{place}.{key}")
    elif isinstance(one, list | tuple):
        if len(one) != len(other):
            yield place
        for i, (a, b) in enumerate(zip(one, other, strict=False)):
            yield from _differences(a, b, f"{place}.{i}")
    elif isinstance(one, torch.Tensor):
        if one.dtype != other.dtype or one.shape != other.shape:
            yield place
        else:
            a, b = (x.contiguous().reshape(-1).view(torch.uint8) for x in (one, other))
            if not torch.equal(a, b):
                yield place
    elif one != other:
        yield place


def prove(folder, options, *, kills, seed=0, task="leaves"):
    """Train twice as above; the differences, none if all is well."""
    chance = random.Random(seed)
    whole, killed = folder / "whole", folder / "killed"
    command = [sys.executable, "-m", "course_lib", "train", task, *options, "--output"]
    start = time.monotonic()
    process = subprocess.Popen([*command, whole])
    began = _wait_for(process, whole) - start
    if process.wait() != 0:
        raise SystemExit(f"the undisturbed run ended with {process.returncode}")
    lasted = time.monotonic() - start - began
    print(f"undisturbed: {began:.0f} s to begin, then {lasted:.0f} s")

    hits = 0
    for _ in range(3 * kills):
        process = subprocess.Popen([*command, killed, *(["--resume"] if killed.exists() else [])])
        # Imports take as long as they did before, so that most moments lie within the training.
        time.sleep(began + chance.uniform(0.2, 1.8) * lasted / (kills + 1))
        process.kill()
        if process.wait() == 0:
            print("it ended before it was killed")
            if hits:
                break
            shutil.rmtree(killed)
            lasted /= 4  # the first run had more to compile
            continue
        if process.returncode != -signal.SIGKILL:
            raise SystemExit(f"it ended with {process.returncode}")
        path = killed / "checkpoint.pt"
        step = torch.load(path, weights_only=True)["step"] if path.exists() else None
        print(f"killed; its checkpoint is of step {step}")
        hits += 1
        if hits == kills:
            break
    if not hits:
        raise SystemExit("no kill hit the run: ask for more epochs")
    subprocess.run([*command, killed, "--resume"], check=True)
    return differences(whole / "checkpoint.pt", killed / "checkpoint.pt")


def _wait_for(process, folder):
    """The time at which `folder` is there: the run has begun."""
    while not folder.exists() and process.poll() is None:
        time.sleep(0.01)
    return time.monotonic()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="an empty one, or one that is not there yet")
    parser.add_argument("--task", default="leaves", help="of train (default: leaves)")
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0, help="of the moments (default: 0)")
    # Those after -- are for `train`; argparse would give them to FOLDER.
    words = sys.argv[1:]
    end = words.index("--") if "--" in words else len(words)
    asked = parser.parse_args(words[:end])
    how = dict(kills=asked.kills, seed=asked.seed, task=asked.task)
    found = prove(asked.folder, words[end + 1 :], **how)
    print("\n".join(found) or "Bit-identical: weights, optimiser, history.")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
