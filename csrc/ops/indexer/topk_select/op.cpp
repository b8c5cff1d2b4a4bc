// dsa::topk_select on CUDA: argument checks, allocation, launch. Definition: docs/indexer/topk_select.md.
#include <optional>
#include <tuple>

#include "ops/indexer/paged_inputs.h"
#include "ops/indexer/topk_select/config.h"
#include "ops/indexer/topk_select/params.h"

namespace dsa::topk_select {
namespace {

constexpr char kOp[] = "dsa::topk_select";

void check_page_table(int64_t rows, const std::optional<Tensor>& page_table, int64_t page_size,
                      const std::optional<Tensor>& row_to_sequence) {
  if (!page_table) {
    DSA_CHECK(!row_to_sequence, kOp, ": row_to_sequence must be None without page_table, got ",
              describe(*row_to_sequence));
    return;
  }
  check_tensor(kOp, "page_table", *page_table, ScalarType::Int, {{"B"}, {"pages"}});
  DSA_CHECK(page_size >= 1 && page_size <= INT32_MAX, kOp, ": page_size must be from 1 to 2^31 - 1, got ", page_size);
  if (row_to_sequence) {
    check_tensor(kOp, "row_to_sequence", *row_to_sequence, ScalarType::Int, {{"R", rows}});
    return;
  }
  const int64_t sequences = page_table->size(0);
  DSA_CHECK(sequences > 0 ? rows % sequences == 0 : rows == 0, kOp,
            ": page_table must be int32 [B, pages] with a B that divides R=", rows, ", or row_to_sequence given, got ",
            describe(*page_table));
}

std::tuple<Tensor, Tensor> topk_select(Tensor logits, Tensor starts, Tensor ends, int64_t topk,
                                       std::optional<Tensor> page_table, int64_t page_size,
                                       std::optional<Tensor> row_to_sequence) {
  check_tensor(kOp, "logits", logits, {ScalarType::Float, ScalarType::BFloat16}, {{"R"}, {"C"}});
  const int64_t rows = logits.size(0);
  check_positions(kOp, "logits", logits, 1);
  check_tensor(kOp, "starts", starts, ScalarType::Int, {{"R", rows}});
  check_tensor(kOp, "ends", ends, ScalarType::Int, {{"R", rows}});
  check_topk(kOp, topk);
  check_page_table(rows, page_table, page_size, row_to_sequence);
  check_last_stride(kOp, "logits", logits);
  check_same_device(kOp, "starts", starts, "logits", logits);
  check_same_device(kOp, "ends", ends, "logits", logits);
  if (page_table) check_same_device(kOp, "page_table", *page_table, "logits", logits);
  if (row_to_sequence) check_same_device(kOp, "row_to_sequence", *row_to_sequence, "logits", logits);
  const DeviceCall call(kOp, "logits", logits);

  Tensor indices = empty({rows, topk}, ScalarType::Int, call.index);
  Tensor values = empty({rows, topk}, logits.scalar_type(), call.index);
  const int columns = static_cast<int>(logits.size(1));
  Params params{
      .logits = logits.data_ptr(),
      .starts = static_cast<const int*>(starts.data_ptr()),
      .ends = static_cast<const int*>(ends.data_ptr()),
      .wanted = nullptr,
      .indices = static_cast<int*>(indices.data_ptr()),
      .values = values.data_ptr(),
      .logits_stride = logits.stride(0),
      .starts_stride = starts.stride(0),
      .ends_stride = ends.stride(0),
      .rows = static_cast<int>(rows),
      .columns = columns,
      .topk = static_cast<int>(topk),
      .device = call.index,
      .num_sms = call.num_sms,
      .is_bf16 = logits.scalar_type() == ScalarType::BFloat16,
      .to_slots = page_table.has_value(),
      .table = {},
  };
  if (page_table) params.table = indexer::page_table_of(*page_table, page_size, rows);
  if (row_to_sequence) {
    params.table.row_to_sequence = static_cast<const int*>(row_to_sequence->data_ptr());
    params.table.stride_row = row_to_sequence->stride(0);
  }
  call.check(launch(params, call.stream()));
  return {indices, values};
}

}  // namespace

const char* launch(const Params& params, void* stream) {
  if (params.rows == 0) return nullptr;
  return params.to_slots ? launch_slots(params, stream) : launch_ids(params, stream);
}

void check_topk(const char* op, int64_t topk) {
  DSA_CHECK(topk >= 1 && topk <= kMaxTopk, op, ": topk must be from 1 to ", kMaxTopk, ", got ", topk);
}

}  // namespace dsa::topk_select

STABLE_TORCH_LIBRARY_IMPL(dsa, CUDA, m) { m.impl("topk_select", TORCH_BOX(&dsa::topk_select::topk_select)); }
