"""wgmma: layout of one product, correctness, times by variant. Parts run in subprocesses."""
import os, subprocess, sys, time
T0 = time.time()
HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))
sys.path[:0] = [ROOT, os.path.join(ROOT, "tests"), HERE]
GO = os.path.join(HERE, "go")
S256, T256, TALL, TALL4, TWO = (128, 256, 3, 1), (128, 256, 4, 1), (256, 128, 3, 1), (256, 128, 4, 1), (128, 128, 3, 2)
VARIANTS = [  # name, module, shape, itemsize, ways (a by k, b by k)
    ("f32 128x256x3", "base", S256, 4, "kk"), ("f32 128x256x4", "base", T256, 4, "kk"),
    ("f32 256x128x3", "base", TALL, 4, "kk"), ("f32 128x128x3x2", "base", TWO, 4, "kk"),
    ("f32 128x256x3 kr", "base", S256, 4, "kr"), ("f32 128x256x3 rr", "base", S256, 4, "rr"),
    ("f32 256x128x3 kr", "base", TALL, 4, "kr"), ("f32 256x128x3 rr", "base", TALL, 4, "rr"),
    ("f32 noload", "noload", S256, 4, "kk"), ("f32 nostore", "nostore", S256, 4, "kk"),
    ("f32 nomma", "nomma", S256, 4, "kk"), ("f32 nofence", "nofence", S256, 4, "kk"),
    ("f32 early", "early", S256, 4, "kk"), ("f32 waitfirst", "waitfirst", S256, 4, "kk"),
    ("f32 band16", "band16", S256, 4, "kk"),
    ("bf16 128x256x4", "base", T256, 2, "kk"), ("bf16 256x128x4", "base", TALL4, 2, "kk"),
    ("bf16 128x128x3x2", "base", TWO, 2, "kk"), ("bf16 128x256x4 kr", "base", T256, 2, "kr"),
    ("bf16 128x256x4 rr", "base", T256, 2, "rr"), ("bf16 nocopy", "nostore", T256, 2, "kk"),
    ("bf16 nomma", "nomma", T256, 2, "kk"), ("bf16 nofence", "nofence", T256, 2, "kk"),
    ("bf16 band16", "band16", T256, 2, "kk"),
]
BROKEN = ("noload", "nostore", "nomma", "nofence")
EDITS = {
    "noload": [("            load_a(words, 0, a, of_a, k)\n            load_b(words, N_A, b, of_b, k)\n", "")],
    "nostore": [("            store_a(words, 0, cache, at)\n            store_b(words, N_A, cache, at + A_SIZE)\n", ""),
                ("            copy_tiles(cache, to, a, b, of_a, of_b, k)\n", "            end_group()\n")],
    "nomma": [("            multiply_tiles(acc, cache, at + mine, at + A_SIZE, TILE_N, BY_ROW)\n", "")],
    "nofence": [("            show_to_products()\n            cuda.syncthreads()", "            cuda.syncthreads()")],
    "early": [("            multiply_tiles(acc, cache, at + mine, at + A_SIZE, TILE_N, BY_ROW)\n            load_a(words, 0, a, of_a, k)\n            load_b(words, N_A, b, of_b, k)\n",
               "            load_a(words, 0, a, of_a, k)\n            load_b(words, N_A, b, of_b, k)\n            multiply_tiles(acc, cache, at + mine, at + A_SIZE, TILE_N, BY_ROW)\n")],
    "waitfirst": [("            load_a(words, 0, a, of_a, k)\n            load_b(words, N_A, b, of_b, k)\n            wait_for_earlier_products()\n",
               "            wait_for_earlier_products()\n            load_a(words, 0, a, of_a, k)\n            load_b(words, N_A, b, of_b, k)\n")],
    "band16": [("from course_lib.kernels.gemm.place import", "from v_place16 import")],
}
def module(name):
    if name == "base":
        from course_lib.kernels.gemm import warpgroup
        return warpgroup
    import importlib
    return importlib.import_module("v_" + name)
def write_variants():
    text = open(os.path.join(ROOT, "course_lib/kernels/gemm/warpgroup.py")).read()
    for name, edits in EDITS.items():
        new = text
        for old, to in edits:
            assert old in new, (name, old)
            new = new.replace(old, to)
        open(os.path.join(HERE, f"v_{name}.py"), "w").write(new)
    place = open(os.path.join(ROOT, "course_lib/kernels/gemm/place.py")).read()
    open(os.path.join(HERE, "v_place16.py"), "w").write(place.replace("BAND = 8 ", "BAND = 16 "))
def sources(ways):
    return tuple("by_k" if w == "k" else "by_row" for w in ways)
def made(v):
    m = module(v[1])
    return m, m.make(m.Shape(*v[2]), sources(v[4]), v[3])
def warm(which):
    from course_lib.runtime.compiler import compile_kernel
    from course_lib.runtime.launch import array_type, numba_type
    for v in VARIANTS[which::12]:
        _, (k, s, _) = made(v)
        types = [array_type("float32" if v[3] == 4 else "bfloat16")] * 4 + [numba_type("int64")] * 4
        c = compile_kernel(k, types, (9, 0))
        if c.stack_bytes: print("STACK", v, c.stack_bytes)
def report(name, f, e):
    bad = ~(f == e)
    print("layout", name, "ok" if not bad.any() else f"WRONG {int(bad.sum())} of {f.numel()}", flush=True)
    if bad.any():
        rows, cols = bad.any(1).nonzero().flatten().tolist(), bad.any(0).nonzero().flatten().tolist()
        print(" rows", rows[:20], len(rows), "cols", cols[:20], len(cols), "ratio", (f / e).nanmedian().item())
        print(" found", f[:3, :6].tolist(), "expected", e[:3, :6].tolist())
def probe(tw, dtype, columns, by_row):
    import torch
    size = 128 // dtype.itemsize
    for k in (0, 1, 8, 16, 33):  # one-hot k of A: which k of B does it meet, in which row and column
        z = torch.zeros(64 + columns, size)
        if k < size:
            z[:64, k] = 1
            z[64:, :] = torch.arange(size).float() + 1
            f, _ = tw.one_product(dtype, columns, z, by_row)
            print("  A k", k, "meets B k", [f[i, j].item() / 2 - 1 for i, j in ((0, 0), (9, 1), (63, columns - 1))])
    z = torch.zeros(64 + columns, size); z[64:, 0] = 1; z[:64, 0] = torch.arange(64).float() + 1
    f, _ = tw.one_product(dtype, columns, z, by_row); print("  rows", [f[i, 0].item() / 2 - 1 for i in range(0, 64, 7)])
    z = torch.zeros(64 + columns, size); z[:64, 0] = 1; z[64:, 0] = torch.arange(columns).float() + 1
    f, _ = tw.one_product(dtype, columns, z, by_row); print("  columns", [f[0, j].item() / 2 - 1 for j in range(0, columns, 17)], flush=True)
def layout():
    import torch, test_warpgroup as tw
    for dtype in tw.DTYPES:
        for columns in (8, 256):
            f, e = tw.one_product(dtype, columns)
            report((dtype, columns), f, e)
            if not torch.equal(f, e): probe(tw, dtype, columns, 0)
    products("kk")
def layout_by_row():
    import torch, test_warpgroup as tw
    for by_row in (1, 2, 3):
        f, e = tw.one_product(torch.bfloat16, 256, by_row=by_row)
        report(("bf16 by row", by_row), f, e)
        if not torch.equal(f, e): probe(tw, torch.bfloat16, 256, by_row)
    products("kr"); products("rr")
def products(ways):
    import torch, test_warpgroup as tw
    torch.backends.cuda.matmul.allow_tf32 = False
    for v in VARIANTS:
        if v[4] != ways or v[1] != "base": continue
        out = []
        for M, N, K in ((512, 512, 512), (128, 256, 128 // v[3]), (1000, 1032, 520), (136, 328, 72)):
            dtype = torch.float32 if v[3] == 4 else torch.bfloat16
            arrays = tw.tensors(M, N, K, dtype)
            opt = tw.ADD_BIAS + tw.RELU + tw.VECTORS
            from course_lib.kernels.gemm.warpgroup import Shape
            c = tw.multiply(*arrays, opt, Shape(*v[2]), tuple(w == "k" for w in ways))
            e = tw.true_product(*arrays, opt)
            out.append(f"{tw.error(c, e):.2e}")
            if not float(out[-1]) < 4e-3:
                bad = ~((c.double() - e).abs() <= 1e-2 * e.abs() + 1e-1)
                r, q = bad.any(1).nonzero().flatten().tolist(), bad.any(0).nonzero().flatten().tolist()
                print("  wrong", v[0], (M, N, K), int(bad.sum()), "rows", r[:8], r[-3:], len(r), "cols", q[:8], q[-3:], len(q))
        print("products", v[0], out, flush=True)
def run(m, k, s, sb, a, b, c, M, N, K):
    from course_lib.runtime.launch import launch
    launch(k, m.n_blocks(s, M, N), s.n_threads, a, b, c, c, M, N, K, 4, shared_bytes=sb, flat=True, overlap=True)
    return c
def timed(cases, rounds, n):
    import torch
    best = {name: [] for name in cases}
    for _ in range(rounds):
        for name, case in cases.items():
            case(); case()
            e = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            e[0].record()
            for _ in range(n): case()
            e[1].record(); e[1].synchronize()
            best[name].append(e[0].elapsed_time(e[1]) * 1000 / n)
    return {name: sorted(t)[len(t) // 2] for name, t in best.items()}
def times():
    import torch
    from course_lib.kernels import gemm
    torch.backends.cuda.matmul.allow_tf32 = True
    n = 4096
    g = torch.Generator("cuda").manual_seed(1)
    x = [torch.randn(n, n, device="cuda", generator=g) for _ in range(2)]
    h = [t.bfloat16() for t in x]
    torch.cuda.synchronize()
    while not os.path.exists(GO): time.sleep(0.05)
    cases, kernels = {}, {}
    def turned(t, w): return t if w == "k" else t.t().contiguous()
    for v in VARIANTS:
        try:
            m, parts = made(v)
            a, b = (turned(t, w) for t, w in zip(x if v[3] == 4 else h, v[4]))
            c = torch.empty_like(a)
            cases[v[0]] = lambda m=m, p=parts, a=a, b=b, c=c: run(m, *p, a, b, c, n, n, n)
            kernels[v[0]] = m, parts
            first = cases[v[0]]().clone(); torch.cuda.synchronize()
            if v[1] not in BROKEN:
                same = all(torch.equal(first, cases[v[0]]()) for _ in range(8))
                if not same: print("NOT THE SAME TWICE", v[0], flush=True)
        except Exception as e:
            cases.pop(v[0], None); print("FAILED", v[0], repr(e)[:300], flush=True)
    for name, (a, b) in {"f32": x, "bf16": h}.items():
        c, d = torch.empty_like(a), torch.empty_like(a)
        cases[name + " cuBLAS"] = lambda a=a, b=b, c=c: torch.matmul(a, b.T, out=c)
        for w in ("kk", "kr", "rr"):
            p, q = turned(a, w[0]), turned(b, w[1])
            cases[f"{name} mma.sync {w}"] = lambda p=p, q=q, d=d, w=w: gemm_old(gemm, p, q, d, n, n, n, w)
    true = {"f32": x[0].double() @ x[1].double().T, "bf16": h[0].double() @ h[1].double().T}
    found = {}
    for name, case in cases.items():
        y = case().double(); t = true[name.split()[0]]
        found[name] = ((y - t).norm() / t.norm()).item()
    for name, t in timed(cases, 5, 8).items():
        print(f"{name:22} {t:8.1f} us {2 * n**3 / t / 1e6:6.0f} TFLOP/s  error {found[name]:.2e}", flush=True)
    del cases, true
    print("M N K: us of " + ", ".join(("128x256", "256x128", "128x128x2", "mma.sync", "cuBLAS")))
    for kind, itemsize, names in (("f32", 4, ("f32 128x256x3", "f32 256x128x3", "f32 128x128x3x2")), ("bf16", 2, ("bf16 128x256x4", "bf16 256x128x4", "bf16 128x128x3x2"))):
        for M, N, K in ((8192, 8192, 8192), (3072, 3072, 3072), (2048, 2048, 2048), (1024, 4096, 1024), (1024, 1024, 1024), (512, 4096, 4096), (4096, 1280, 320), (256, 8192, 1024)):
            a, b = (torch.randn(r, K, device="cuda").to(torch.float32 if itemsize == 4 else torch.bfloat16) for r in (M, N))
            c = torch.empty(M, N, device="cuda", dtype=a.dtype)
            cases = {name: lambda m=kernels[name][0], p=kernels[name][1]: run(m, *p, a, b, c, M, N, K) for name in names if name in kernels}
            cases["old"] = lambda: gemm_old(gemm, a, b, c, M, N, K, "kk")
            cases["cublas"] = lambda: torch.matmul(a, b.T, out=c)
            print(kind, M, N, K, [round(t, 1) for t in timed(cases, 3, 5 if M > 4096 else 20).values()], flush=True)
def gemm_old(gemm, a, b, c, M, N, K, w):
    strides = ((K, 1) if w[0] == "k" else (1, M)), ((K, 1) if w[1] == "k" else (1, N))
    gemm._launch_tensor_core(a, b, c, c, M, N, K, *strides, 0, "tf32")
    return c
def child(*args):
    return subprocess.Popen([sys.executable, __file__, *map(str, args)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
if __name__ == "__main__":
    if len(sys.argv) > 1:
        {"warm": lambda: warm(int(sys.argv[2])), "layout": layout, "by_row": layout_by_row, "times": times}[sys.argv[1]]()
        sys.exit()
    if os.path.exists(GO): os.remove(GO)
    write_variants()
    warmers = [child("warm", i) for i in range(12)]
    def finish(name, p, limit):
        try:
            out, _ = p.communicate(timeout=max(1, limit - (time.time() - T0)))
        except subprocess.TimeoutExpired:
            p.kill(); out = "TIMEOUT " + p.communicate()[0]
        if out.strip() or p.returncode: print(f"== {name} rc {p.returncode} at {time.time() - T0:.1f} s\n{out[-6000:] if p.returncode == 0 else out[-1500:]}", flush=True)
    last = child("times")
    first = [("layout", child("layout")), ("by_row", child("by_row"))]
    for name, p in first: finish(name, p, 26)
    for i, p in enumerate(warmers): finish(f"warm {i}", p, 26)
    print(f"go at {time.time() - T0:.1f} s", flush=True)
    open(GO, "w").close()
    finish("times", last, 44)
    os.remove(GO)
