"""The promises that operators keep on a GPU: about streams, graphs, and who waits for whom."""

import re
from unittest import mock

import torch
from contract.held import require
from contract.memory import same_bits
from contract.operators import said
from tensors import never_waiting


def streams(held):
    """Both passes run on the caller's stream: after what it has to do before."""
    moved = [x + 1 for x in held.operands]
    expected, stream = held.run(moved), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)  # about 10 ms: what runs elsewhere would be done before
        found = held.run([x + 1 for x in held.operands])
    torch.cuda.current_stream().wait_stream(stream)
    require(all(map(same_bits, found, expected)), "streams", "other bits on another stream")


def captured(held):
    """A captured graph of both passes computes anew at each replay."""
    given, stream = [x.clone() for x in held.operands], torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            held.run(given)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with mock.patch.object(torch, "manual_seed"), torch.cuda.graph(graph):
        found = held.run(given)
    for factor in (1, -2):
        for x, before in zip(given, held.operands, strict=True):
            x.copy_(before * factor)
        graph.replay()
        expected = held.run([x.clone() for x in given])
        require(all(map(same_bits, found, expected)), "captured", f"other bits at times {factor}")


def unwaiting(held):
    """Nothing makes the host wait for the GPU."""
    held.run()  # the first time, kernels are loaded
    with never_waiting():
        fault = said(RuntimeError, held.run)
    require(fault is None, "unwaiting", fault)


def alone(held):
    """The operators of both passes launch kernels of ours alone: nothing is filled or copied."""
    calls = [
        (operator, [x.detach() if torch.is_tensor(x) else x for x in args])
        for operator, args in held.calls.items()
    ]
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.no_grad():
        for operator, args in calls:
            operator(*args)
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=activities) as profile:
            for operator, args in calls:
                operator(*args)
            torch.cuda.synchronize()
    names = [event.name for event in profile.events() if event.device_type.name == "CUDA"]
    theirs = [name for name in names if re.search("at::|fill|cutlass", name, re.IGNORECASE)]
    require(names and not theirs, "alone", f"launched: {theirs or names}")


ON_A_GPU = streams, captured, unwaiting, alone
