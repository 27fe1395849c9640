"""The host side: device arrays, streams, events, devices, reductions."""


import numpy as np
import pytest

from course_lib.simulator import cuda


@cuda.jit
def double(x):
    i = cuda.grid(1)
    if i < x.size:
        x[i] *= 2


def test_device_arrays_offer_no_arithmetic():
    there = cuda.to_device(np.ones(3))
    with pytest.raises(TypeError):
        there + 1
    assert list(there) == [1, 1, 1]
    with pytest.raises(TypeError, match="incompatible dtype"):
        there.copy_to_device(np.ones(3, np.float32))
    with pytest.raises(ValueError, match="incompatible shape"):
        there.copy_to_host(np.ones(4))
    with pytest.raises(ValueError, match="non-contiguous"):
        cuda.to_device(np.zeros((4, 4))[::2, ::2])


def test_new_arrays():
    assert np.isnan(cuda.device_array(3, np.float32).copy_to_host()).all()
    assert (cuda.device_array((2, 2), np.uint8).copy_to_host() == 0xCD).all()
    fortran = np.zeros((3, 4), np.int16, order="F")
    like = cuda.device_array_like(fortran)
    assert (like.shape, like.dtype, like.strides) == ((3, 4), np.int16, fortran.strides)
    packed = cuda.device_array_like(np.broadcast_to(np.zeros(3), (2, 3)))
    assert packed.strides == (8, 16)  # as numba: the repeated axis varies fastest
    for make in (cuda.pinned_array, cuda.mapped_array, cuda.managed_array):
        array = make((2, 3), np.float32, order="F")
        assert array.shape == (2, 3) and array.flags.f_contiguous
    for make in (cuda.pinned_array_like, cuda.mapped_array_like):
        assert make(fortran).strides == fortran.strides


def test_as_cuda_array():
    there = cuda.to_device(np.zeros(2))
    assert cuda.as_cuda_array(there) is there and cuda.is_cuda_array(there)
    assert not cuda.is_cuda_array(np.zeros(2))
    with pytest.raises(TypeError, match="to_device"):
        cuda.as_cuda_array(np.zeros(2))
    torch = pytest.importorskip("torch")
    tensor = torch.ones(3)
    double[1, 3](cuda.as_cuda_array(tensor))
    assert tensor.tolist() == [2, 2, 2]


def test_streams_and_events():
    stream = cuda.stream()
    start, end = cuda.event(), cuda.event(timing=True)
    start.record(stream)
    with stream.auto_synchronize():
        double[1, 4, stream](np.zeros(4))
    end.record(stream)
    end.wait(stream)
    end.synchronize()
    stream.synchronize()
    cuda.synchronize()
    assert end.query() and cuda.event_elapsed_time(start, end) == start.elapsed_time(end) > 0
    with pytest.raises(RuntimeError, match="two recorded events"):
        cuda.event().elapsed_time(end)
    called = []
    stream.add_callback(lambda stream, status, arg: called.append((status, arg)), 3)
    assert called == [(0, 3)]
    for make in (cuda.default_stream, cuda.legacy_default_stream, cuda.per_thread_default_stream):
        make().synchronize()
    assert cuda.external_stream(0).external


def test_devices_and_contexts(capsys):
    assert cuda.is_available() and cuda.is_supported_version() and cuda.cuda_error() is None
    assert len(cuda.gpus) == 1 and len(list(cuda.list_devices())) == 1
    device = cuda.get_current_device()
    assert device.compute_capability == (9, 0) and device.WARP_SIZE == 32
    assert device.MAX_THREADS_PER_BLOCK == 1024
    with cuda.gpus[0] as context:
        assert context.device is device
    assert cuda.current_context().get_memory_info().total > 0
    free, total = cuda.current_context().get_memory_info()
    assert 0 < free <= total
    cuda.select_device(0)
    with pytest.raises(ValueError, match="one device"):
        cuda.select_device(1)
    with pytest.raises(IndexError):
        cuda.gpus[1]
    cuda.close()
    assert cuda.detect()
    assert "simulator" in capsys.readouterr().out
    with cuda.defer_cleanup(), cuda.profiling(), cuda.pinned(np.zeros(1)):
        cuda.profile_start()
        cuda.profile_stop()
    host = np.ones(2)
    with cuda.mapped(host) as there:
        double[1, 2](there)
    assert host.tolist() == [2, 2]


def test_what_needs_a_compiler_says_so():
    extending = cuda.extending
    for refused in (lambda: cuda.compile_ptx(None, ()), lambda: cuda.declare_device("f", "i4(i4)"),
                    lambda: double.inspect_asm(), lambda: extending.intrinsic(lambda context: None),
                    lambda: extending.overload(abs)):
        with pytest.raises(NotImplementedError):
            refused()
    assert extending.register_jitable(len) is len
    assert extending.register_jitable(inline="always")(len) is len


def test_device_functions_are_not_for_the_host():
    for use in (lambda: cuda.syncthreads(), lambda: cuda.threadIdx.x, lambda: cuda.grid(1),
                lambda: cuda.shared.array(3, np.float32),
                lambda: cuda.jit(device=True)(double.py_func)(1)):
        with pytest.raises(RuntimeError, match="inside a kernel"):
            use()
    assert repr(cuda.laneid) == "<laneid>"
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = cuda.no_such_name


def test_kernel_objects():
    assert double.py_func.__name__ == double.__name__ == "double"
    assert double.specialize(1) is double and "kernel double" in repr(double)
    version = double.compile("void(float64[:])")
    assert version in double.overloads.values()
    assert version.max_cooperative_grid_blocks(256) == 132 * 8
    configured = double.configure(1, 4, 0, 16)
    assert (configured.griddim, configured.blockdim, configured.sharedmem) == (
        (1, 1, 1), (4, 1, 1), 16)
