// Moves elements between buffers whose blocks may be strided.
#pragma once

#include <cstdint>

#include "plan/boxes.h"

namespace jaxcomm {

// How a buffer of `num_blocks` blocks lies in memory: as an array of shape
// (block_count / contiguous_count, num_blocks, contiguous_count). Each block consists of fragments of contiguous_count
// elements, and fragment k of all blocks precedes fragment k + 1 of any block. A tiled split or concatenation along an
// inner axis has this layout. With contiguous_count == block_count, each block is contiguous.
struct BlockLayout {
  int64_t num_blocks = 1;
  int64_t block_count = 0;
  int64_t contiguous_count = 0;

  bool contiguous() const { return contiguous_count == block_count || num_blocks == 1; }
};

// A buffer, addressed by the logical element offsets of plan.h.
struct View {
  char* base = nullptr;
  BlockLayout layout;
  int32_t pid = 0;               // process that `base` belongs to; 0: this one
  const Cells* cells = nullptr;  // not null: the buffer is a box, and `layout` is unused
};

// Walks a view fragment by fragment from a logical offset.
class Cursor {
 public:
  Cursor(const View& view, int64_t offset, int64_t item_bytes);

  char* at() const { return at_; }
  int64_t left_bytes() const { return left_bytes_; }  // to the end of the fragment
  int64_t fragment_bytes() const { return fragment_bytes_; }
  int64_t stride_bytes() const { return stride_bytes_; }  // between consecutive fragments of a block
  int64_t fragments_left() const;                         // complete ones at equal strides; 0 inside one
  void Advance(int64_t bytes);                            // at most left_bytes()
  void AdvanceFragments(int64_t fragments);               // at most fragments_left(), from the start of one

 private:
  void Enter(int64_t block, int64_t fragment, int64_t within_bytes);
  void EnterCell(int64_t cell, int64_t fragment, int64_t within_bytes);

  char* base_;
  const Cells* cells_;
  int64_t item_bytes_;
  int64_t num_blocks_;
  int64_t fragments_per_block_;
  int64_t fragment_bytes_;
  int64_t stride_bytes_;
  int64_t block_ = 0;
  int64_t fragment_ = 0;
  char* at_ = nullptr;
  int64_t left_bytes_ = 0;
};

// memcpy. `stream` bypasses the caches, for destinations that are not read soon.
void CopyBytes(char* dst, const char* src, int64_t bytes, bool stream);

// The same for many copies with one StreamFence() after the last.
void StreamBytes(char* dst, const char* src, int64_t bytes);
// memset(dst, 0, bytes) in the same way.
void StreamZeros(char* dst, int64_t bytes);
// Orders streamed stores before later stores: a release does not.
void StreamFence();

// Copies `count` elements; offsets are logical. The two ranges must not overlap in memory. `src` may lie in another
// process: returns false if it cannot be read there.
bool CopyElements(const View& dst, int64_t dst_offset, const View& src, int64_t src_offset, int64_t count,
                  int64_t item_bytes, bool stream);

void ZeroElements(const View& dst, int64_t offset, int64_t count, int64_t item_bytes);

}  // namespace jaxcomm
