// Programmatic dependent launch (PDL): a kernel starts while the preceding kernel of the stream is still running.
#pragma once

namespace dsa::sm90 {

// griddepcontrol.launch_dependents: the next kernel may start once every CTA has called this or exited
__device__ __forceinline__ void launch_dependents() { asm volatile("griddepcontrol.launch_dependents;"); }

// griddepcontrol.wait: waits until the preceding kernel is complete and its writes are visible
__device__ __forceinline__ void wait_for_preceding_kernel() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

}  // namespace dsa::sm90
