#include "instances.cuh"

namespace dsa::topk_select {

const char* launch_slots(const Params& p, void* stream) { return launch_rows<true>(p, stream); }

}  // namespace dsa::topk_select
