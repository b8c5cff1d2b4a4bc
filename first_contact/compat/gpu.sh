#!/bin/bash
# First contact of dsa_ext.compat on a Hopper GPU. Run in the repository root. <= 120 s in all.
export PYTHONPATH=. PYTHONDONTWRITEBYTECODE=1
OUT=${OUT:-/tmp/out}; mkdir -p "$OUT"
part() { local limit=$1 name=$2; shift 2; echo "=== $name"; local t=$SECONDS; timeout "$limit" "$@" 2>&1 | tail -n "${LINES_OF:-40}"; echo "--- $name: exit ${PIPESTATUS[0]}, $((SECONDS - t)) s"; }
mkdir -p /tmp/upstream && tar xzf scratch/upstream.tgz -C /tmp/upstream

part 15 smoke python3 scratch/smoke.py
part 22 "compat GPU tests" python3 -m pytest -q -s tests/compat/test_compat_gpu.py -p no:cacheprovider
part 22 "max_logits, quick" python3 -m pytest -q -x tests/sparse_mla/test_sparse_mla_max_fwd_gpu.py -p no:cacheprovider -k "few or falling or finite"
for only in sparse_prefill sparse_decoding mqa_logits paged_mqa_logits; do
  part 12 "upstream $only" python3 tests/compat/run_upstream.py --flash-mla /tmp/upstream/FlashMLA --deep-gemm /tmp/upstream/DeepGEMM --only $only --seconds 4 --json "$OUT/upstream_$only.json"
done
part 12 timing python3 scratch/timing.py
