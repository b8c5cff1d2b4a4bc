#!/bin/bash
# First contact of PagedKVCache on a GPU; run in the repository root. Needs the compiled kernels of sparse_mla_decode and indexer_topk_paged.
export PYTHONPATH=.:scratch
: "${OUT:=.}"
timeout 15 python3 - <<'PY'
import torch, dsa_ext
from dsa_ext.nn import SparseMLA
print(dsa_ext.build_info())
torch.manual_seed(0); torch.set_grad_enabled(False)
layer = SparseMLA(256, 16, q_lora_rank=192, topk=48, indexer={"heads": 8, "head_dim": 64}, device="cuda", dtype=torch.bfloat16)
x = torch.randn(1, 100, 256, device="cuda").bfloat16()
for dtype in (torch.bfloat16, torch.float8_e4m3fn):
    cache = layer.make_cache(1, 8, 2, 128, dtype=dtype)
    s = cache.add(); cache.prefill([s], [90]); a = layer(x[:, :90], cache=cache)
    torch.cuda.synchronize(); print("prefill", a.out.float().norm().item())
    cache.decode([s]); b = layer(x[:, 90:91], cache=cache)
    torch.cuda.synchronize()
    whole = layer(x[:, :91])
    print("decode", (b.out - whole.out[:, 90:]).abs().max().item(), whole.out.abs().max().item(), torch.equal(cache.positions_of(b.ids), whole.ids[:, 90:]))
PY
timeout 45 python3 -m pytest -x -q --durations=5 tests/sparse_mla/test_sparse_mla_module_cache_gpu.py 2>&1 | tail -40
timeout 20 python3 examples/train.py --dense-steps 30 --warmup-steps 5 --sparse-steps 8 --measure-every 1000 --picture $OUT/training.png --checkpoint $OUT/model.pt 2>&1 | tail -12
timeout 18 python3 examples/generate.py --checkpoint $OUT/model.pt --tokens 128 2>&1 | tail -60
timeout 22 python3 scratch/gpu_step.py
rm -f $OUT/model.pt
