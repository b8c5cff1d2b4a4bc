"""Times of a step of decoding of one layer of the sizes of DeepSeek-V3.2 as a CUDA graph, and of its parts."""
import json, os, time
import torch
import dsa_ext
from dsa_ext.nn import SparseMLA
from dsa_ext.testing.timing import time_ms

torch.manual_seed(0)
torch.set_grad_enabled(False)
layer = SparseMLA(7168, 128, device="cuda", dtype=torch.bfloat16)

def graphed(call):
    call(); torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay

results = []
for B, N, context, dtype in ((1, 1, 8192, torch.float8_e4m3fn), (1, 1, 131072, torch.float8_e4m3fn), (1, 1, 32768, torch.bfloat16),
                             (32, 1, 32768, torch.float8_e4m3fn), (128, 1, 8192, torch.float8_e4m3fn), (128, 2, 8192, torch.float8_e4m3fn)):
    begin = time.time()
    cache = layer.make_cache(1, B * (context // 64 + 2), B, context + 64, dtype=dtype)
    names = [cache.add() for _ in range(B)]
    k = torch.randn(context, 128, device="cuda").bfloat16()
    q = torch.randn(1, 1, 128, device="cuda").bfloat16()
    _, _, k8, scale = dsa_ext.quantize_indexer(q, k)
    kv = torch.randn(context, 576, device="cuda").bfloat16()
    for name in names:
        cache.prefill([name], [context]); cache.write(0, kv); cache.write_index(0, k8, scale)
    x = torch.randn(B, N, 7168, device="cuda").bfloat16()
    host = []
    for _ in range(20):
        torch.cuda.synchronize(); t = time.perf_counter(); cache.decode(names, N); host.append(time.perf_counter() - t)
    for name in names: cache.truncate(name, context)
    cache.decode(names, N)
    step = cache.step
    whole = time_ms(graphed(lambda: layer(x, cache=cache)), total_ms=60)
    out = layer(x, cache=cache)
    assert out.out.isfinite().all()
    q8 = torch.randn(B, N, 64, 128, device="cuda").to(torch.float8_e4m3fn); w = torch.randn(B * N, 64, device="cuda")
    select = time_ms(graphed(lambda: dsa_ext.indexer_topk_paged(q8, cache.index_keys(0), w, step.context_lens, step.block_table, 2048, return_slots=True)), total_ms=60)
    qa = torch.randn(B, N, 128, 576, device="cuda").bfloat16()
    attend = time_ms(graphed(lambda: dsa_ext.sparse_mla_decode(qa, cache.kv(0), out.ids)), total_ms=60)
    results.append(dict(B=B, N=N, context=context, dtype=str(dtype), step_us=whole * 1e3, select_us=select * 1e3, attend_us=attend * 1e3, host_decode_us=min(host) * 1e6))
    print(results[-1], f"({time.time() - begin:.1f} s)", flush=True)
    del cache, step, out
json.dump(results, open(os.path.join(os.environ.get("OUT", "."), "decode_step.json"), "w"), indent=1)
