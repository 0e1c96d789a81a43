#include "plan/slices.h"

#include <algorithm>
#include <string>

namespace jaxcomm {
namespace {

std::string Rows(int64_t begin, int64_t count) {
  return "rows [" + std::to_string(begin) + ", " + std::to_string(begin + count) + ")";
}

// Whether rows [offset, offset + size) exist. No sum can overflow.
bool Inside(int64_t offset, int64_t size, int64_t num_rows) {
  return offset >= 0 && size <= num_rows && offset <= num_rows - size;
}

// A slice as its receiver sees it.
struct Written {
  Slice slice;
  int32_t from = 0;
};

class Checker {
 public:
  Checker(const Slices& slices, int64_t input_rows, int64_t output_rows, const int64_t* ranks)
      : slices_(slices), input_rows_(input_rows), output_rows_(output_rows), ranks_(ranks) {}

  Status Run() {
    const int32_t n = slices_.num_ranks();
    for (int32_t from = 0; from < n; ++from) {
      for (int32_t to = 0; to < n; ++to) {
        for (int64_t i = 0; i < slices_.per_pair(); ++i) JAXCOMM_RETURN_IF_ERROR(CheckSlice(from, to, i));
      }
    }
    for (int32_t to = 0; to < n; ++to) JAXCOMM_RETURN_IF_ERROR(CheckOverlap(to));
    return OkStatus();
  }

 private:
  std::string Rank(int32_t rank) const { return "rank " + std::to_string(ranks_[rank]); }

  Status CheckSlice(int32_t from, int32_t to, int64_t i) const {
    const Slice slice = slices_.At(from, to, i);
    const int64_t expected = slices_.ReceivedSize(from, to, i);
    const auto wrong = [&](const std::string& text) {
      return InvalidArgumentError("slice " + std::to_string(i) + " from " + Rank(from) + " to " + Rank(to) + ": " +
                                  text);
    };
    const std::string sizes = "send_sizes is " + std::to_string(slice.size) + " at " + Rank(from) +
                              " and recv_sizes is " + std::to_string(expected) + " at " + Rank(to);
    if (slice.size != expected) return wrong(sizes + ", expected equal sizes");
    if (slice.size < 0) return wrong(sizes + ", expected at least 0");
    if (slice.size == 0) return OkStatus();
    if (!Inside(slice.input_offset, slice.size, input_rows_)) {
      return wrong("it starts at row " + std::to_string(slice.input_offset) + " of the operand (input_offsets of " +
                   Rank(from) + "), but the operand has " + std::to_string(input_rows_) + " rows; " + sizes);
    }
    if (!Inside(slice.output_offset, slice.size, output_rows_)) {
      return wrong("it goes to row " + std::to_string(slice.output_offset) + " of the output (output_offsets of " +
                   Rank(from) + "), but the output has " + std::to_string(output_rows_) + " rows; " + sizes);
    }
    return OkStatus();
  }

  Status CheckOverlap(int32_t to) {
    const auto before = [](const Written& a, const Written& b) {
      return a.slice.output_offset < b.slice.output_offset;
    };
    written_.clear();
    for (int32_t from = 0; from < slices_.num_ranks(); ++from) {
      for (int64_t i = 0; i < slices_.per_pair(); ++i) {
        const Slice slice = slices_.At(from, to, i);
        if (slice.size > 0) written_.push_back({slice, from});
      }
    }
    if (!std::is_sorted(written_.begin(), written_.end(), before)) {
      std::stable_sort(written_.begin(), written_.end(), before);
    }
    for (size_t i = 1; i < written_.size(); ++i) {
      const Written &a = written_[i - 1], &b = written_[i];
      if (a.slice.output_offset + a.slice.size <= b.slice.output_offset) continue;
      return InvalidArgumentError(Rank(a.from) + " writes " + Rows(a.slice.output_offset, a.slice.size) + " and " +
                                  Rank(b.from) + " writes " + Rows(b.slice.output_offset, b.slice.size) +
                                  " of the output of " + Rank(to) + ": slices must not overlap there");
    }
    return OkStatus();
  }

  const Slices& slices_;
  const int64_t input_rows_;
  const int64_t output_rows_;
  const int64_t* const ranks_;
  std::vector<Written> written_;
};

}  // namespace

Status CheckSlices(const Slices& slices, int64_t input_rows, int64_t output_rows, const int64_t* ranks) {
  return Checker(slices, input_rows, output_rows, ranks).Run();
}

}  // namespace jaxcomm
