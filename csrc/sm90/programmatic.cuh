// A kernel that is launched while the one before it still runs.
#pragma once

namespace dsa::sm90 {

// griddepcontrol.launch_dependents: once all CTAs have come here or ended, those of the next kernel may start
__device__ __forceinline__ void let_next_kernel_start() { asm volatile("griddepcontrol.launch_dependents;"); }

// griddepcontrol.wait: until the kernel before has ended, and what it wrote is visible
__device__ __forceinline__ void wait_for_kernel_before() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

}  // namespace dsa::sm90
