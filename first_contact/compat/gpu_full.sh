#!/bin/bash
# The complete runs (several minutes): the grid of max_logits and every served case of the other libraries' tests.
export PYTHONPATH=. PYTHONDONTWRITEBYTECODE=1
OUT=${OUT:-/tmp/out}; mkdir -p "$OUT" /tmp/upstream; tar xzf scratch/upstream.tgz -C /tmp/upstream
timeout 300 python3 -m pytest -q tests/sparse_mla/test_sparse_mla_max_fwd_gpu.py -p no:cacheprovider 2>&1 | tail -15
timeout 590 python3 tests/compat/run_upstream.py --flash-mla /tmp/upstream/FlashMLA --deep-gemm /tmp/upstream/DeepGEMM --seconds ${EACH:-130} --json "$OUT/upstream.json"
