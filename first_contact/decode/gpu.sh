#!/bin/bash
# First contact on a GPU: smoke, tests, timings. Each part has its own limit; at most 120 s in all.
# scratch/ is git-ignored: carry it (smoke.py, timings.py) besides the built library.
export PYTHONPATH=. OUT=${OUT:-/tmp}
part() { echo "=== $1"; timeout "$2" "${@:3}"; rc=$?; echo "=== $1: rc $rc"; return $rc; }
part smoke 35 python3 scratch/smoke.py || SMOKE=1
if [ -z "$SMOKE" ]; then
  part timings 40 python3 scratch/timings.py
  part tests 45 python3 -m pytest -x -q tests/sparse_mla/test_pack_kv_fp8_gpu.py tests/sparse_mla/test_sparse_mla_decode_gpu.py -k "not 2_to_the_32 and not compile" 2>&1 | tail -25
else
  part sanitizer 60 compute-sanitizer --tool memcheck python3 scratch/smoke.py 2>&1 | head -60
fi
