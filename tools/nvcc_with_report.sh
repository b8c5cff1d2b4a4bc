#!/bin/sh
# Runs nvcc ($DSA_EXT_NVCC) and keeps what ptxas reports about registers, spills and shared memory of each kernel next to
# the object file: launch.o gets launch.o.ptxas. Tests read it.
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
