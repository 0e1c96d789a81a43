// Moves elements between buffers whose blocks may be strided.
#pragma once

#include <cstdint>

namespace jaxcomm {

// How a buffer of `num_blocks` blocks lies in memory. A block is cut into runs of `run` elements; run k of all blocks
// lie side by side, block by block, before run k + 1 of any. That is an array (block_count / run, num_blocks, run):
// the blocks of a tiled split or concatenation along an inner axis. run == block_count is block after block.
struct BlockLayout {
  int64_t num_blocks = 1;
  int64_t block_count = 0;
  int64_t run = 0;

  bool contiguous() const { return run == block_count || num_blocks == 1; }
};

// A buffer, addressed by the logical element numbers of plan.h.
struct View {
  char* base = nullptr;
  BlockLayout layout;
  int32_t pid = 0;  // of the process that the address is in; 0: this one
};

// Walks a view run by run from a logical offset.
class Cursor {
 public:
  Cursor(const View& view, int64_t offset, int64_t item_bytes);

  char* at() const { return at_; }
  int64_t left_bytes() const { return left_bytes_; }  // until the run ends
  int64_t run_bytes() const { return run_bytes_; }
  int64_t stride_bytes() const { return stride_bytes_; }  // from a run to the next of the same block
  int64_t whole_runs() const;                             // runs that lie `stride_bytes` apart from here on
  void Advance(int64_t bytes);                            // at most left_bytes()
  void AdvanceRuns(int64_t runs);                         // at most whole_runs(), from the start of a run

 private:
  void Enter(int64_t block, int64_t run, int64_t within_bytes);

  char* base_;
  int64_t num_blocks_;
  int64_t runs_per_block_;
  int64_t run_bytes_;
  int64_t stride_bytes_;
  int64_t block_ = 0;
  int64_t run_ = 0;
  char* at_ = nullptr;
  int64_t left_bytes_ = 0;
};

// memcpy; `stream` writes past the caches, for destinations that nobody reads soon.
void CopyBytes(char* dst, const char* src, int64_t bytes, bool stream);

// Copies `count` elements from logical offset to logical offset. The two ranges must not overlap in memory. `src` may
// lie in another process: false if it can't be read there any more.
bool CopyElements(const View& dst, int64_t dst_offset, const View& src, int64_t src_offset, int64_t count,
                  int64_t item_bytes, bool stream);

void ZeroElements(const View& dst, int64_t offset, int64_t count, int64_t item_bytes);

}  // namespace jaxcomm
