"""Tiny calls of every instance, each checked; prints the measures of what is wrong and goes on."""
import sys, time, traceback
import torch, dsa_ext
from dsa_ext.testing.inputs import make_cache, spoil_indices
from dsa_ext.testing.tolerances import errors, check
torch.manual_seed(0)
print(torch.__version__, torch.cuda.get_device_name(), flush=True)
kv = torch.randn(37, 576, device="cuda").bfloat16()
p = dsa_ext.pack_kv_fp8(kv); torch.cuda.synchronize(); print("pack", check("pack_kv_fp8", p, {"kv": kv}), flush=True)
bad = 0
for heads in (64, 16, 32, 128, 5):
    for packed in (True, False):
        for d_qk in (576, 512):
            for topk, batch, inv in ((1, 1, True), (64, 1, True), (200, 2, True), (2048, 1, False), (300, 150, False)):
                i = make_cache(batch, 1, 40, 64, heads, topk, d_qk, packed=packed, device="cuda")
                ids = spoil_indices(i.indices, 2560) if topk == 200 else i.indices
                args = {"q": i.q, "kv_cache": i.kv_cache, "indices": ids, "batch_invariant": inv}
                name = f"H={heads} packed={packed} d={d_qk} K={topk} B={batch} inv={inv}"
                t = time.time()
                res = torch.ops.dsa.sparse_mla_decode(**args); torch.cuda.synchronize()
                try:
                    e = check("sparse_mla_decode", res, args)
                    if topk in (64, 2048) and d_qk == 576: print("ok ", name, {k: round(v, 2) for k, v in e.items()}, flush=True)
                except AssertionError as err:
                    bad += 1
                    print("BAD", name, str(err)[:400], flush=True)
                    if bad <= 2:
                        from dsa_ext import reference
                        q, c = i.q.cpu().double(), i.kv_cache.cpu()
                        o, l = reference.sparse_mla_decode(q, c, ids.cpu())
                        print("  lse got", res[1].flatten()[:4].tolist(), "expected", l.flatten()[:4].tolist())
                        d = (res[0].double().cpu() - o).abs()
                        print("  worst columns", d.flatten(0, -2).amax(0).topk(6), "heads", d.flatten(0, 1).amax((0, 2)).topk(min(6, heads)).indices.tolist(), flush=True)
print("smoke:", "all right" if not bad else f"{bad} wrong")
sys.exit(bad != 0)
