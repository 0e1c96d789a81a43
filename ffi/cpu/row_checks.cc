#include "cpu/row_checks.h"

#include <cstring>
#include <iterator>
#include <string>

#include "common/hash.h"

namespace jaxcomm {
namespace {

// The slices of a dispatch or combine number the choices of a rank expert by expert, without gaps.
Status CheckPacked(const Slices& slices) {
  for (int32_t from = 0; from < slices.num_ranks(); ++from) {
    int64_t next = 0;
    for (int32_t to = 0; to < slices.num_ranks(); ++to) {
      for (int64_t i = 0; i < slices.per_pair(); ++i) {
        const Slice slice = slices.At(from, to, i);
        if (slice.size > 0 && slice.input_offset != next) {
          return InvalidArgumentError("the choices of a rank are not packed by expert");
        }
        next += slice.size;
      }
    }
  }
  return OkStatus();
}

}  // namespace

Status CheckRows(const CallSpec& spec, const Participant& participant, const RankBuffers& buffers, const Slices& slices,
                 int32_t position) {
  if (buffers.index == nullptr || spec.row_count <= 0) return OkStatus();
  const bool combines = TraitsOf(spec.collective).SumsTokens();
  const int64_t num_rows = participant.input_count / spec.row_count;
  const auto missing = [&](int32_t row) {
    return InvalidArgumentError(spec.Where() + ": " + "row " + std::to_string(row) +
                                " of the routing does not exist, expected " + std::to_string(num_rows) + " rows");
  };
  for (int64_t i = 0; i < participant.index_count; ++i) {
    const int32_t row = buffers.index[i];
    if (combines && row < 0) continue;
    if (row < 0 || row >= num_rows) return missing(row);
    if (!combines) continue;
    const int32_t expert = buffers.expert[i];
    if (expert < 0 || expert >= spec.num_experts) {
      return InvalidArgumentError(spec.Where() + ": " + "expert " + std::to_string(expert) +
                                  " of the routing does not exist, expected one of " +
                                  std::to_string(spec.num_experts));
    }
    const auto to = static_cast<int32_t>(expert / slices.per_pair());
    const Slice slice = slices.At(position, to, expert % slices.per_pair());
    if (row < slice.output_offset || row >= slice.output_offset + slice.size) {
      return InvalidArgumentError(spec.Where() + ": " + "row " + std::to_string(row) + " of expert " +
                                  std::to_string(expert) + " does not belong to this rank");
    }
  }
  return OkStatus();
}

uint64_t HashOfTable(const Participant& participant) {
  if (participant.table == nullptr) return 0;
  const auto* const bytes = static_cast<const char*>(participant.table);
  const int64_t size = participant.table_count * (participant.int64_table ? 8 : 4);
  // Four hashes, so that the processor computes several at once.
  uint64_t lanes[] = {1, 2, 3, 4}, words[std::size(lanes)] = {};
  const auto mix = [&] {
    for (size_t i = 0; i < std::size(lanes); ++i) lanes[i] = Mix(lanes[i], words[i]);
  };
  constexpr auto kBytes = static_cast<int64_t>(sizeof(words));
  for (int64_t i = 0; i < size / kBytes; ++i) {
    std::memcpy(words, bytes + i * kBytes, kBytes);
    mix();
  }
  // The rest, onto the last words.
  std::memcpy(words, bytes + size / kBytes * kBytes, static_cast<size_t>(size % kBytes));
  mix();
  uint64_t hash = static_cast<uint64_t>(size);
  for (const uint64_t lane : lanes) hash = Mix(hash, lane);
  return hash;
}

StatusOr<Slices> CheckedSlices(const CallSpec& spec, const Participant& participant, int64_t group) {
  if (!OfLists(spec.collective)) return Slices();
  const bool of_experts = TraitsOf(spec.collective).elements != ElementKind::kSlices;
  const int64_t n = spec.group_size, row = spec.row_count;
  const int64_t per_rank = participant.table_count / (4 * n);
  if (row < 0 || per_rank * 4 * n != participant.table_count || per_rank % n != 0 ||
      (of_experts && per_rank != spec.num_experts)) {
    return InvalidArgumentError(spec.Where() + ": " + "a table of " + std::to_string(participant.table_count) +
                                " integers does not fit a group of " + std::to_string(n) + " ranks");
  }
  if (row == 0) return Slices();  // no data; the numbers of rows are unknown
  const bool combines = TraitsOf(spec.collective).SumsTokens();
  const int64_t payload_rows = (combines ? participant.output_count : participant.input_count) / row;
  const int64_t slots = (combines ? participant.input_count : participant.output_count) / row;
  const int64_t choices = payload_rows * (spec.per_choice != 0 ? 1 : spec.choices);
  if (of_experts && participant.index_count != choices) {
    return InvalidArgumentError(spec.Where() + ": a routing of " + std::to_string(participant.index_count) +
                                " choices does not fit " + std::to_string(payload_rows) + " rows");
  }
  const Slices slices(participant.table, participant.int64_table, static_cast<int32_t>(n), per_rank);
  Status checked = CheckSlices(slices, of_experts ? choices : payload_rows, slots, spec.groups.data() + group * n);
  if (checked.ok() && of_experts) checked = CheckPacked(slices);
  if (!checked.ok()) return WithPrefix(spec.Where() + ": ", checked);
  return slices;
}

}  // namespace jaxcomm
