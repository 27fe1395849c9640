"""The online softmax in CUDA C++: a warp for each row, pointers, and types that are written."""

SOURCE = r"""
extern "C" __global__ void softmax_online(const float *x, float *y, int n_rows, int n_cols)
{
    const float minus_inf = -__int_as_float(0x7F800000);
    int row = (blockIdx.x * blockDim.x + threadIdx.x) / 32, lane = threadIdx.x % 32;
    if (row >= n_rows) return;
    x += (long long)row * n_cols;
    y += (long long)row * n_cols;
    float m = minus_inf, s = 0.0f;
    for (int col = lane; col < n_cols; col += 32) {
        float value = x[col];
        if (value > m) {
            s = s * expf(m - value) + 1.0f;
            m = value;
        } else if (value != minus_inf) {
            s += expf(value - m);
        }
    }
    for (int k = 0; k < 5; ++k) {
        float m1 = m, m2 = __shfl_xor_sync(0xFFFFFFFF, m, 1 << k);
        float s2 = __shfl_xor_sync(0xFFFFFFFF, s, 1 << k);
        m = fmaxf(m1, m2);
        s = (m1 == m ? s : s * expf(m1 - m)) + (m2 == m ? s2 : s2 * expf(m2 - m));
    }
    for (int col = lane; col < n_cols; col += 32)
        y[col] = expf(x[col] - m) / s;
}
"""
WARPS = 4  # rows that a block works on


def softmax(x):
    """Return the softmax of each row of x, a NumPy array of float32 (rows, columns), as another."""
    import ctypes

    from cuda.bindings import driver

    from course_lib import cuda

    there, result = cuda.to_device(x), cuda.device_array_like(x)  # numba's memory and context
    image, _ = _compiled(cuda.get_current_device().compute_capability)
    module = _done(driver.cuModuleLoadData(image))
    kernel = _done(driver.cuModuleGetFunction(module, b"softmax_online"))
    pointers = [array.__cuda_array_interface__["data"][0] for array in (there, result)]
    types = ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_int
    arguments = (*pointers, *x.shape), types
    cuda.synchronize()
    grid, block = (-(-len(x) // WARPS), 1, 1), (32 * WARPS, 1, 1)
    _done(driver.cuLaunchKernel(kernel, *grid, *block, 0, 0, arguments, 0))
    cuda.synchronize()
    y = result.copy_to_host()
    _done(driver.cuModuleUnload(module))
    return y


def ptx(cc):
    """Return what the kernel becomes for a compute capability such as (9, 0), as text."""
    return _compiled(cc)[1].decode().rstrip("\0")


def _compiled(cc):
    """Return the cubin and the PTX for a compute capability, both as bytes.

    Raises RuntimeError with the compiler's own words where it refuses the source.
    """
    from cuda.bindings import nvrtc

    program = _done(nvrtc.nvrtcCreateProgram(SOURCE.encode(), b"softmax.cu", 0, [], []))
    (status,) = nvrtc.nvrtcCompileProgram(program, 1, ["-arch=sm_{}{}".format(*cc).encode()])
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        log = bytearray(_done(nvrtc.nvrtcGetProgramLogSize(program)))
        _done(nvrtc.nvrtcGetProgramLog(program, log))
        raise RuntimeError(log.decode())
    image = bytearray(_done(nvrtc.nvrtcGetCUBINSize(program)))
    _done(nvrtc.nvrtcGetCUBIN(program, image))
    text = bytearray(_done(nvrtc.nvrtcGetPTXSize(program)))
    _done(nvrtc.nvrtcGetPTX(program, text))
    _done(nvrtc.nvrtcDestroyProgram(program))
    return bytes(image), bytes(text)


def _done(answer):
    """Return what a call of CUDA gave beside its status. Raises RuntimeError for a failure."""
    status, *found = answer
    if status:
        raise RuntimeError(f"CUDA refused: {status!r}")
    return found[0] if found else None
