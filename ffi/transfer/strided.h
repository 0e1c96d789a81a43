// Arrays with any strides, and walks over boxes of them.
//
// A box is sent as its elements in row-major order of the dimensions that both sides agree on. The strides are each
// side's own: so the two may store the dimensions in another order, or hold other parts of the array.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "common/status.h"
#include "plan/boxes.h"

namespace jaxcomm {

constexpr size_t kMaxDimensions = 16;

struct StridedArray {
  char* base = nullptr;
  int64_t item_bytes = 0;
  std::vector<int64_t> sizes;
  std::vector<int64_t> strides;  // bytes
  // Index i of this dimension lies where pages[i] says; -1: there is no such dimension.
  int32_t page_dimension = -1;
  std::vector<int64_t> pages;
};

// The number of bytes of a box, if it lies in the array.
StatusOr<int64_t> BytesOf(const StridedArray& array, const Box& box);

// A part of one of several arrays.
struct Piece {
  uint32_t array = 0;
  Box box;
};

// Copies all elements between arrays of the same sizes.
void CopyAll(const StridedArray& from, const StridedArray& to);

// Walks over a box, which must have passed BytesOf.
class Walk {
 public:
  // The array must outlive the walk.
  Walk(const StridedArray& array, const Box& box);

  // The next contiguous bytes, at most `limit`. *bytes is 0 at the end.
  char* Next(int64_t limit, int64_t* bytes);

  int64_t contiguous() const { return left_ < left_of_run_ ? left_ : left_of_run_; }  // bytes that Next can return

 private:
  struct Dimension {
    int64_t begin;
    int64_t end;
    int64_t stride;
    const int64_t* pages;
    int64_t at;
  };
  int64_t OffsetOf(const Dimension& d) const { return (d.pages != nullptr ? d.pages[d.at] : d.at) * d.stride; }
  char* Start() const;

  char* base_;
  int64_t run_bytes_;  // of contiguous elements
  int64_t left_;       // bytes of the box
  int64_t left_of_run_;
  char* at_ = nullptr;
  std::vector<Dimension> dimensions_;  // of runs, outermost first
};

// Walks over pieces of arrays, one after the other.
class PieceWalk {
 public:
  PieceWalk() = default;
  explicit PieceWalk(std::vector<Piece> pieces) : pieces_(std::move(pieces)) {}

  const std::vector<Piece>& pieces() const { return pieces_; }
  // The walk over what is left of the current piece. Requires that bytes are left.
  Walk& Rest(const std::vector<StridedArray>& arrays) {
    while (!walk_ || walk_->contiguous() == 0) {
      const Piece& piece = pieces_[next_++];
      walk_.emplace(arrays[piece.array], piece.box);
    }
    return *walk_;
  }

 private:
  std::vector<Piece> pieces_;
  size_t next_ = 0;
  std::optional<Walk> walk_;
};

}  // namespace jaxcomm
