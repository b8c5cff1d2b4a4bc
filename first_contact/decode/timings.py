"""Microseconds per call in CUDA graphs, and beside what the issue demands."""
import torch, dsa_ext, json, os
from dsa_ext.testing.inputs import make_inputs
from dsa_ext.testing.timing import time_ms
OP = torch.ops.dsa.sparse_mla_decode.default
CONTEXT, TOPK, PAGE = 32768, 2048, 64

def graph_us(calls, replays=12):
    for c in calls[:2]: c()
    torch.cuda.synchronize(); g = torch.cuda.CUDAGraph()
    with torch.cuda.graph(g): kept = [c() for c in calls]
    a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    ts = []
    for _ in range(replays):
        a.record(); g.replay(); b.record(); torch.cuda.synchronize(); ts.append(a.elapsed_time(b) * 1e3 / len(calls))
    return sorted(ts)[len(ts) // 2]

base = torch.randn(65536, 576, device="cuda").bfloat16()
caches = {}
def cache(packed, slots):
    if (packed, slots) not in caches:
        caches.clear()
        rows = dsa_ext.pack_kv_fp8(base) if packed else base
        c = rows.new_empty(slots, rows.shape[1])
        for i in range(0, slots, 65536): c[i:i + 65536] = rows[:min(65536, slots - i)]
        caches[packed, slots] = c.view(slots // PAGE, PAGE, 1, -1)
    return caches[packed, slots]

def ids(B, N):
    r = torch.rand(B * N, CONTEXT, device="cuda").topk(TOPK).indices.sort().values.view(B, N, TOPK)
    return (r + torch.arange(B, device="cuda")[:, None, None] * CONTEXT).int()

MUST = {(True, 128, 128, 2): "<=400 aim 320", (True, 128, 32, 1): "<=70", (True, 128, 1, 1): "<=18 aim 10", (True, 64, 128, 2): "<=245",
        (True, 64, 1, 1): "<=18", (True, 16, 128, 1): "<=0.7 x H=64's"}
results = []
def one(packed, H, B, N, **opt):
    c = cache(packed, B * CONTEXT)
    sets = [(torch.randn(B, N, H, 576, device="cuda").bfloat16(), ids(B, N)) for _ in range(2 if B > 32 else 4)]
    n = 4 if B > 32 else 20
    us = graph_us([lambda s=sets[i % len(sets)]: OP(s[0], c, s[1], **opt) for i in range(n)])
    single = graph_us([lambda: OP(sets[0][0], c, sets[0][1], **opt)], 30)
    tf = 2 * B * N * H * TOPK * 1088 / us / 1e6
    tb = B * N * TOPK * c.shape[-1] * c.element_size() / us / 1e6
    plan = ""
    print(f"packed={packed} H={H} B={B} N={N} {opt or ''}: {us:.1f} us in a row, {single:.1f} us alone, {tf:.0f} TFLOP/s, {tb:.2f} TB/s of keys   must {MUST.get((packed, H, B, N), '-')}", flush=True)
    results.append(dict(packed=packed, H=H, B=B, N=N, us=us, single=single, **opt))

for B, N in ((128, 2), (128, 1)):
    for H in (128, 64, 32, 16): one(True, H, B, N)
one(True, 128, 128, 2, batch_invariant=True)
for B in (64, 32, 8, 1):
    for H in (128, 64, 16): one(True, H, B, 1)
for H in (128, 16): one(True, H, 1, 1, batch_invariant=True)
for H, B, N in ((128, 128, 1), (128, 128, 2), (64, 128, 1), (16, 128, 1), (128, 1, 1)): one(False, H, B, N)
caches.clear()
i = make_inputs(1, 256, CONTEXT, 128, 1, TOPK, device="cuda")
us = graph_us([lambda: torch.ops.dsa.sparse_mla_fwd(i.q, i.kv, i.indices, causal=False) for _ in range(4)])
print(f"sparse_mla_fwd S=256 H=128 S_kv=32768: {us:.1f} us, {2*256*128*TOPK*1088/us/1e6:.0f} TFLOP/s")
i = make_inputs(1, 4096, CONTEXT, 128, 1, TOPK, device="cuda")
us = graph_us([lambda: torch.ops.dsa.sparse_mla_fwd(i.q, i.kv, i.indices, causal=False)])
print(f"sparse_mla_fwd S=4096 H=128 S_kv=32768: {us:.1f} us, {2*4096*128*TOPK*1088/us/1e6:.0f} TFLOP/s")
if os.environ.get("OUT"): json.dump(results, open(os.environ["OUT"] + "/decode.json", "w"))
