#!/bin/sh
# Runs nvcc ($DSA_EXT_NVCC) and keeps what ptxas reports of each kernel's registers, spills and shared memory beside the
# object: launch.o gets launch.o.ptxas. The package's tests read it.
object=
previous=
for argument in "$@"; do
  [ "$previous" = "-o" ] && object=$argument
  previous=$argument
done
$DSA_EXT_NVCC "$@" 2>"$object.ptxas"
status=$?
[ "$status" -eq 0 ] || cat "$object.ptxas" >&2
exit "$status"
