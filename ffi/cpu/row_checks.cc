#include "cpu/row_checks.h"

#include <string>

namespace jaxcomm {

Status CheckRows(const CallSpec& spec, const Participant& participant, const RankBuffers& buffers) {
  if (buffers.index == nullptr || spec.row_count <= 0) return OkStatus();
  const bool combines = spec.collective == Collective::kCombine;
  const int64_t num_rows = participant.input_count / spec.row_count;
  for (int64_t i = 0; i < participant.index_count; ++i) {
    const int32_t row = buffers.index[i];
    if (combines && row < 0) continue;
    if (row < 0 || row >= num_rows) {
      return InvalidArgumentError(spec.Where() + ": " + "row " + std::to_string(row) +
                                  " of the routing does not exist, expected " + std::to_string(num_rows) + " rows");
    }
    if (combines && (buffers.expert[i] < 0 || buffers.expert[i] >= spec.num_experts)) {
      return InvalidArgumentError(spec.Where() + ": " + "expert " + std::to_string(buffers.expert[i]) +
                                  " of the routing does not exist, expected one of " +
                                  std::to_string(spec.num_experts));
    }
  }
  return OkStatus();
}

StatusOr<Slices> CheckedSlices(const CallSpec& spec, const Participant& participant, int64_t group) {
  if (spec.collective != Collective::kAllToAllV) return Slices();
  const int64_t n = spec.group_size, row = spec.row_count;
  const int64_t per_rank = participant.table_count / (4 * n);
  if (row < 0 || per_rank * 4 * n != participant.table_count || per_rank % n != 0) {
    return InvalidArgumentError(spec.Where() + ": " + "a table of " + std::to_string(participant.table_count) +
                                " integers does not fit a group of " + std::to_string(n) + " ranks");
  }
  if (row == 0) return Slices();  // no data; the numbers of rows are unknown
  const Slices slices(participant.table, participant.wide_table, static_cast<int32_t>(n), per_rank);
  const int64_t input_rows = participant.index != nullptr ? participant.index_count : participant.input_count / row;
  const Status checked =
      CheckSlices(slices, input_rows, participant.output_count / row, spec.groups.data() + group * n);
  if (!checked.ok()) return WithPrefix(spec.Where() + ": ", checked);
  return slices;
}

}  // namespace jaxcomm
