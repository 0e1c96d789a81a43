#include "transfer/strided.h"

#include <algorithm>
#include <cstring>
#include <string>

namespace jaxcomm {

StatusOr<int64_t> BytesOf(const StridedArray& array, const Box& box) {
  const size_t n = array.sizes.size();
  if (box.begin.size() != n || box.end.size() != n) {
    return InvalidArgumentError("a box of " + std::to_string(box.begin.size()) + " dimensions of an array of " +
                                std::to_string(n));
  }
  int64_t bytes = array.item_bytes;
  for (size_t d = 0; d < n; ++d) {
    if (box.begin[d] < 0 || box.begin[d] > box.end[d] || box.end[d] > array.sizes[d]) {
      return InvalidArgumentError("box [" + std::to_string(box.begin[d]) + ", " + std::to_string(box.end[d]) +
                                  ") in dimension " + std::to_string(d) + " of size " + std::to_string(array.sizes[d]));
    }
    bytes *= box.end[d] - box.begin[d];  // at most the bytes of the array
  }
  return bytes;
}

void CopyAll(const StridedArray& from, const StridedArray& to) {
  const Box all = {std::vector<int64_t>(from.sizes.size(), 0), from.sizes};
  Walk source(from, all), destination(to, all);
  while (source.contiguous() > 0) {
    int64_t bytes = 0;
    const char* data = source.Next(destination.contiguous(), &bytes);
    std::memcpy(destination.Next(bytes, &bytes), data, static_cast<size_t>(bytes));
  }
}

Walk::Walk(const StridedArray& array, const Box& box) : base_(array.base), run_bytes_(array.item_bytes) {
  left_ = array.item_bytes;
  bool merging = true;
  for (size_t d = array.sizes.size(); d-- > 0;) {
    const int64_t count = box.end[d] - box.begin[d];
    left_ *= count;
    const bool paged = static_cast<int32_t>(d) == array.page_dimension;
    // The run grows as long as each dimension continues where the ones inside end.
    if (merging && !paged && (count == 1 || array.strides[d] == run_bytes_)) {
      base_ += box.begin[d] * array.strides[d];
      run_bytes_ *= count;
    } else {
      merging = false;
      dimensions_.push_back(
          {box.begin[d], box.end[d], array.strides[d], paged ? array.pages.data() : nullptr, box.begin[d]});
    }
  }
  std::reverse(dimensions_.begin(), dimensions_.end());
  left_of_run_ = run_bytes_;
  if (left_ > 0) at_ = Start();
}

char* Walk::Start() const {
  char* start = base_;
  for (const Dimension& d : dimensions_) start += OffsetOf(d);
  return start;
}

char* Walk::Next(int64_t limit, int64_t* bytes) {
  *bytes = std::min({limit, left_of_run_, left_});
  char* const found = at_;
  at_ += *bytes;
  left_ -= *bytes;
  left_of_run_ -= *bytes;
  if (left_of_run_ == 0 && left_ > 0) {
    for (size_t d = dimensions_.size(); d-- > 0;) {
      if (++dimensions_[d].at < dimensions_[d].end) break;
      dimensions_[d].at = dimensions_[d].begin;
    }
    left_of_run_ = run_bytes_;
    at_ = Start();
  }
  return found;
}

}  // namespace jaxcomm
