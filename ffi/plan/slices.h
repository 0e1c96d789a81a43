// The slices of a ragged exchange, which are known at run time only.
//
// A row is the unit of a slice. Each rank sends `per_pair` slices to each rank; a list is the slices of one pair. The
// table holds four vectors per rank, as jax.lax.ragged_all_to_all takes them. All ranks have the whole table.
#pragma once

#include <cstdint>
#include <vector>

#include "common/status.h"

namespace jaxcomm {

struct Slice {
  int64_t input_offset = 0;   // rows, at the sender
  int64_t output_offset = 0;  // rows, at the receiver
  int64_t size = 0;           // rows
};

class Slices {
 public:
  Slices() = default;
  // data: (num_ranks, 4, per_rank) integers of 4 or 8 bytes. It must outlive this object.
  Slices(const void* data, bool wide, int32_t num_ranks, int64_t per_rank)
      : data_(data), wide_(wide), num_ranks_(num_ranks), per_rank_(per_rank) {}

  int32_t num_ranks() const { return num_ranks_; }
  int64_t per_rank() const { return per_rank_; }
  int64_t per_pair() const { return per_rank_ / num_ranks_; }

  Slice At(int32_t from, int32_t to, int64_t i) const {
    const int64_t slice = to * per_pair() + i;
    return {Number(from, kInputOffset, slice), Number(from, kOutputOffset, slice), Number(from, kSendSize, slice)};
  }
  // The size that the receiver expects.
  int64_t ReceivedSize(int32_t from, int32_t to, int64_t i) const {
    return Number(to, kReceivedSize, from * per_pair() + i);
  }

 private:
  enum Vector { kInputOffset, kSendSize, kOutputOffset, kReceivedSize, kNumVectors };
  int64_t Number(int32_t rank, Vector vector, int64_t slice) const {
    const int64_t i = (static_cast<int64_t>(rank) * kNumVectors + vector) * per_rank_ + slice;
    return wide_ ? static_cast<const int64_t*>(data_)[i] : static_cast<const int32_t*>(data_)[i];
  }

  const void* data_ = nullptr;
  bool wide_ = false;
  int32_t num_ranks_ = 1;
  int64_t per_rank_ = 0;
};

// Checks all slices of all ranks. Every rank gets the same result and the same text. An empty slice may have any
// offsets.
//
// ranks: names of the ranks in messages.
Status CheckSlices(const Slices& slices, int64_t input_rows, int64_t output_rows, const int64_t* ranks);

}  // namespace jaxcomm
