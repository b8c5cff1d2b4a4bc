"""smoke|save|compare|time|profile LIBRARY [FILE]"""
import sys, types, time
from pathlib import Path
import torch
mode, library = sys.argv[1], sys.argv[2]
# the package with the given library
import importlib.util
source = Path("dsa_ext/_native.py").read_text().replace('_PACKAGE / "_C.abi3.so"', f'Path("{Path(library).resolve()}")')
native = types.ModuleType("dsa_ext._native"); native.__file__ = str(Path("dsa_ext/_native.py").resolve())
sys.modules["dsa_ext._native"] = native
exec(compile(source, "dsa_ext/_native.py", "exec"), native.__dict__)
import dsa_ext
from dsa_ext.testing.inputs import make_indexer_inputs, nasty_rows
from dsa_ext.testing.timing import time_ms
FP8, BF16 = torch.float8_e4m3fn, torch.bfloat16
TOPK = torch.ops.dsa.indexer_topk
assert str(native.library) == str(Path(library).resolve()), native.missing_reason

def make(s, n, h=64, d=128, dtype=FP8):
    return make_indexer_inputs(s, n, h, d, dtype=dtype, device="cuda", seed=1)
def topk(i, k=2048): return TOPK(i.q, i.k, i.weights, i.ks, i.ke, k, i.k_scale)
def composed(i, k=2048):
    l = torch.ops.dsa.indexer_logits(i.q, i.k, i.weights, i.ks, i.ke, i.k_scale, True)
    return torch.ops.dsa.topk_select(l, i.ks, i.ke, k)
def whole(i):
    i.ks.zero_(); i.ke.fill_(len(i.k)); return i
def same(a, b): return all(torch.equal(x.view(torch.int32), y.view(torch.int32)) for x, y in zip(a, b))
def cases():
    for s, n, h, d, t, k in ((1, 131072, 64, 128, FP8, 2048), (8, 100000, 64, 128, FP8, 2048), (32, 131072, 64, 128, FP8, 2048), (4101, 16400, 64, 128, FP8, 2048),
                          (1030, 66001, 32, 128, FP8, 2048), (1030, 66001, 16, 64, FP8, 300), (4101, 16400, 32, 128, BF16, 2048),
                          (1030, 66001, 64, 64, BF16, 4096), (300, 262139, 32, 128, BF16, 2048), (4096, 131072, 64, 128, FP8, 2048)):
        yield f"{s}x{n} h{h} d{d} {t} k{k}", make(s, n, h, d, t), k
    i = make(16384, 16384, 32, 128, BF16); yield "causal 16384", i, 2048
    i = make(1030, 70001, 32)
    i.k = i.k[:1].expand_as(i.k).contiguous(); i.weights = i.weights.abs() + 1e-3
    for name, row in nasty_rows(70001, device="cuda").items():
        i.k_scale = row; yield "nasty " + name, i, 2048

if mode == "smoke":
    for s, n, h, t in ((3, 300, 64, FP8), (3, 30001, 32, BF16), (1, 131072, 64, FP8), (8, 131072, 64, FP8), (70, 9000, 64, FP8), (1030, 66001, 64, FP8), (1030, 66001, 32, BF16), (4101, 16400, 16, FP8)):
        i = make(s, n, h, dtype=t)
        r = topk(i); torch.cuda.synchronize(); ok = same(r, composed(i)); torch.cuda.synchronize()
        print(s, n, h, t, "same as composed:", ok, flush=True); assert ok
        i.weights[::3] = 0
        r = topk(i); torch.cuda.synchronize(); ok = same(r, composed(i)); torch.cuda.synchronize()
        print("   with rows of zeros:", ok, flush=True); assert ok
    print("smoke ok", flush=True)
elif mode == "save":
    torch.save({name: [x.cpu() for x in topk(i, k)] for name, i, k in cases()}, sys.argv[3])
elif mode == "compare":
    old = torch.load(sys.argv[3])
    for name, i, k in cases():
        r = topk(i, k)
        again = topk(i, k)
        print(f"{name}: old {same([x.cpu() for x in r], old[name])} composed {same(r, composed(i, k))} again {same(r, again)}", flush=True)
elif mode == "time":
    for s, n, h, t, d in ((1, 131072, 64, FP8, 60), (4, 131072, 64, FP8, 60), (32, 131072, 64, FP8, 60), (128, 131072, 64, FP8, 60), (512, 131072, 64, FP8, 60), (4096, 16384, 64, FP8, 80),
                       (4096, 32768, 64, FP8, 100), (4096, 131072, 64, FP8, 250), (4096, 131072, 32, FP8, 200), (4096, 131072, 16, FP8, 100),
                       (32768, 32768, 32, BF16, 250), (32768, 65536, 32, BF16, 300), (32768, 262144, 32, BF16, 800)):
        i = make(s, n, h, dtype=t)
        ms = time_ms(lambda: topk(i), warmup_ms=20, total_ms=d)
        extra = ""
        if s * n <= 2**29:
            extra = f"  logits alone {time_ms(lambda: torch.ops.dsa.indexer_logits(i.q, i.k, i.weights, i.ks, i.ke, i.k_scale, False), warmup_ms=10, total_ms=d/2)*1e3:.1f}"
        print(f"{s} x {n}, {h} heads, {str(t)[6:]}: {ms*1e3:.1f} us{extra}", flush=True)
        del i
elif mode == "profile":
    from torch.profiler import profile, ProfilerActivity
    for s, n, h, t in ((1, 131072, 64, FP8), (32, 131072, 64, FP8), (4096, 131072, 64, FP8), (4096, 131072, 32, FP8), (32768, 32768, 32, BF16)):
        i = make(s, n, h, dtype=t); topk(i); topk(i); torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as p:
            for _ in range(3): topk(i)
            torch.cuda.synchronize()
        print(s, n, h, t)
        for e in sorted(p.key_averages(), key=lambda e: -e.device_time_total):
            if e.device_time_total > 0: print(f"   {e.key[:90]}: {e.count // 3} calls, {e.device_time_total / 3:.1f} us", flush=True)
