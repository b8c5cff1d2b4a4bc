import torch, dsa_ext
from dsa_ext.compat import deep_gemm, flash_mla
torch.manual_seed(0)
for heads, rows in ((128, 2), (16, 2), (8, 300), (40, 300)):
    q = torch.randn(rows, heads, 576, device="cuda").bfloat16(); kv = torch.randn(900, 1, 576, device="cuda").bfloat16()
    ids = torch.randint(-9, 909, (rows, 1, 512), device="cuda", dtype=torch.int32); ids[1] = -1
    o, m, l = flash_mla.flash_mla_sparse_fwd(q, kv, ids, 0.05); torch.cuda.synchronize()
    ok = (ids >= 0) & (ids < 900); k = kv[ids.clamp(0, 899).long()[:, 0], 0].float()
    s = (q.float() @ k.mT * 0.05).masked_fill(~ok, -torch.inf); ref = s.amax(-1)
    fin = ref > -torch.inf
    print(heads, rows, "max err", (m - ref)[fin].abs().max().item(), "lse err", (l - s.logsumexp(-1))[fin].abs().max().item(), "empty", m[1, 0].item(), l[1, 0].item())
for name, f in (("pack", lambda: dsa_ext.pack_kv_fp8(torch.randn(4, 64, 1, 576, device="cuda").bfloat16())),):
    try:
        cache = f(); torch.cuda.synchronize(); print(name, cache.shape)
        q = torch.randn(2, 1, 128, 576, device="cuda").bfloat16(); ids = torch.randint(-5, 256, (2, 1, 128), device="cuda", dtype=torch.int32); ids[1] = -1
        o, l = flash_mla.flash_mla_with_kvcache(q, cache, None, None, 512, None, None, indices=ids, is_fp8_kvcache=True)
        torch.cuda.synchronize(); print("decode", o.shape, l.shape, l[:, :2, 0].tolist())
    except Exception as e: print(name, "FAILED", str(e)[:300])
q = torch.randn(9, 32, 128, device="cuda").to(torch.float8_e4m3fn); k = torch.randn(300, 128, device="cuda").to(torch.float8_e4m3fn)
ks, ke = torch.arange(9, device="cuda", dtype=torch.int32), torch.full((9,), 299, device="cuda", dtype=torch.int32)
print("logits", deep_gemm.fp8_mqa_logits(q, (k, torch.ones(300, device="cuda")), torch.ones(9, 32, device="cuda"), ks, ke).isinf().sum().item(), "expected", 45 - 9 + 9)
