#!/bin/bash
# First contact of indexer_topk's selection from candidates. Run in the repository root; output in $OUT.
export PYTHONPATH=.
OUT=${OUT:-/tmp/out}; mkdir -p "$OUT"
PY=scratch/topk_gpu.py
OLD=/tmp/old_C.abi3.so; NEW=dsa_ext/_C.abi3.so
gunzip -c scratch/old_C.abi3.so.gz > $OLD
# 1. smoke: tiny, then the first candidate path; each part prints as it goes
timeout 22 python3 $PY smoke $NEW 2>&1 | tee "$OUT/smoke.txt"
grep -q "smoke ok" "$OUT/smoke.txt" || exit 1
# 2. bit for bit against the old library
timeout 15 python3 $PY save $OLD /tmp/old.pt > "$OUT/save.txt" 2>&1 || tail -5 "$OUT/save.txt"
timeout 20 python3 $PY compare $NEW /tmp/old.pt 2>&1 | tee "$OUT/compare.txt"
# 3. timings, old and new in turn
for i in 1 2; do
  timeout 12 python3 $PY time $OLD 2>&1 | sed "s/^/old $i: /" | tee -a "$OUT/times.txt"
  timeout 12 python3 $PY time $NEW 2>&1 | sed "s/^/new $i: /" | tee -a "$OUT/times.txt"
done
# 4. where the time goes
timeout 12 python3 $PY profile $NEW 2>&1 | tee "$OUT/profile.txt"
# 5. (separately, longer) the GPU tests:
#   timeout 300 python3 -m pytest -x -q tests/indexer/test_indexer_topk_candidates_gpu.py tests/indexer/test_indexer_topk_gpu.py
#   timeout 300 python3 -m pytest -x -q tests/indexer/test_topk_select_gpu.py tests/indexer/test_indexer_logits_gpu.py
