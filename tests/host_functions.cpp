// The pure host functions of csrc/, for tests without a GPU.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "ops/sparse_mla_fwd/config.h"
#include "ops/sparse_mla_fwd/plan.h"

namespace py = pybind11;

PYBIND11_MODULE(host_functions, m) {
  namespace op = dsa::sparse_mla_fwd;
  py::module_ fwd = m.def_submodule("sparse_mla_fwd");
  fwd.def("plan_splits", &op::plan_splits, py::arg("items"), py::arg("topk"), py::arg("num_sms"));
  fwd.attr("block_k") = op::kBlockK;
  fwd.attr("max_splits") = op::kMaxSplits;
  fwd.attr("threads") = op::kThreads;
  std::vector<py::tuple> configs;
  for (const op::Config& config : op::kConfigs) {
    configs.push_back(py::make_tuple(config.d_qk, config.d_v, config.heads));
  }
  fwd.attr("configs") = configs;  // (d_qk, d_v, heads)
}
