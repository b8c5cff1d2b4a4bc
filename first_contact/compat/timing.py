import torch, dsa_ext
from dsa_ext.testing.inputs import make_inputs
from dsa_ext.testing.timing import time_ms
for heads, d in ((128, 576), (64, 512), (16, 576)):
    i = make_inputs(seq=4096, s_kv=32768, heads=heads, topk=2048, d_qk=d, device="cuda")
    a = (i.q, i.kv, i.indices)
    plain = time_ms(lambda: torch.ops.dsa.sparse_mla_fwd(*a, causal=False), total_ms=150)
    largest = time_ms(lambda: torch.ops.dsa.sparse_mla_max_fwd(*a, causal=False), total_ms=150)
    print(f"H={heads} D={d}: sparse_mla_fwd {plain:.3f} ms, with max_logits {largest:.3f} ms ({100 * (largest / plain - 1):+.2f} %)")
    del i, a
i = make_inputs(seq=1, s_kv=32768, heads=128, topk=2048, device="cuda"); a = (i.q, i.kv, i.indices)
plain, largest = (time_ms(lambda op=op: op(*a, causal=False), total_ms=50) for op in (torch.ops.dsa.sparse_mla_fwd, torch.ops.dsa.sparse_mla_max_fwd))
print(f"S=1 H=128, split: {plain * 1e3:.1f} us, with max_logits {largest * 1e3:.1f} us")
