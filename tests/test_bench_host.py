"""`benchmarks.host`: what its record holds, worked out without a GPU."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from course_lib import SIMULATED, bench, results_table
from course_lib.benchmarks import host

#: µs of the calls, by label, without and with autograd recording.
SILENT = {
    "torch.nn.Softmax": 6.0, "torch.softmax": 5.0, "nn.Softmax": 8.0, "ops.softmax": 7.0,
    "kernels.softmax": 5.5, "torch.ops.course_lib.softmax": 12.0, "numba-cuda": 40.0,
    "launch": 2.0, "new tensor": 1.5,
}  # fmt: skip
RECORDED = {
    "torch.nn.Softmax": 7.0, "torch.softmax": 6.0, "nn.Softmax": 11.0, "ops.softmax": 10.0,
    "torch.ops.course_lib.softmax": 14.0,
}  # fmt: skip


@pytest.fixture
def clock(monkeypatch):
    """A clock that calls each candidate once and tells the times above; tensors on the CPU."""

    def host_times(candidates, rounds):
        times = SILENT if "launch" in candidates else RECORDED
        assert torch.is_grad_enabled() == (times is RECORDED) and rounds == 3
        for label, function in candidates.items():
            y = function()
            if "oftmax" in label:
                assert torch.allclose(y.sum(-1), torch.ones(()), atol=1e-5)
                assert y.requires_grad == (times is RECORDED)
        assert list(candidates) == list(times)
        return {label: bench.Timing(value, (value, value)) for label, value in times.items()}

    randn, prepared = torch.randn, []
    monkeypatch.setattr(bench, "host_times", host_times)
    monkeypatch.setattr(torch, "randn", lambda shape, device: randn(5, 8))
    monkeypatch.setattr(
        host.launching, "prepare",
        lambda *launch, **options: SimpleNamespace(launch=lambda found: prepared.append(found)),
    )  # fmt: skip
    return prepared


@pytest.mark.skipif(not SIMULATED, reason="stands in for the GPU")
def test_calls_and_parts(clock):
    (record,) = host.run(rounds=3)
    assert len(clock) == 1 and len(clock[0]) == 2  # the bare launch, of two addresses
    assert record["name"] == "softmax.host" and record["shape"] == [128, 200]
    assert record["kernel_hash"] == host.kernel_hashes()["softmax.host"]
    rows = {row["label"]: row for row in record["rows"]}
    assert rows["nn.Softmax"]["ratio_to_module"] == round(8 / 6, 2)
    assert rows["nn.Softmax, recorded"]["ratio_to_module"] == round(11 / 7, 2)
    assert [rows[label]["kind"] for label in ("torch.softmax", "ops.softmax, recorded")] == [
        "peer", "ours",
    ]  # fmt: skip
    parts = {k.removeprefix("part: "): row["microseconds"] for k, row in rows.items() if ":" in k}
    assert list(parts.values()) == [2.0, 1.5, 2.0, 1.5, 1.0, 3.0]
    assert np.isclose(sum(parts.values()), rows["nn.Softmax, recorded"]["microseconds"])
    recording = {"device": {"name": "A chip"}, "records": [record]}
    assert "`softmax.host`, on the host's clock: torch.nn.Softmax 6.0 µs" in results_table.page(
        [recording]
    )


@pytest.mark.gpu
def test_on_a_gpu():
    (record,) = host.run(rounds=3)
    rows = {row["label"]: row["microseconds"] for row in record["rows"]}
    assert min(rows.values()) > 0, rows
