// Arguments of the kernels. Plain data, which the host fills in without CUDA.
#pragma once

#include <cstdint>

#include "common/dtype.h"
#include "cuda/program/bulk_ring.h"
#include "cuda/program/program.h"
#include "include/jaxcomm/comm.h"

namespace jaxcomm::cuda {

// The type of a program's elements, and the operation of its reduce steps.
struct Operation {
  DType dtype = DType::kF32;
  ReduceOp op = ReduceOp::kSum;
};

// A copy that the kernel makes between buffers of the same layout. No copy if `to` is null.
struct BufferCopy {
  char* to = nullptr;
  const char* from = nullptr;
};

// One rank's call. Plain data. Pointers point to device memory.
struct RankArgs {
  device::Comm comm;
  device::Window input;  // of the node's ranks; only of this rank if the program does not share it
  device::Window output;
  device::Window scratch;
  // By rank of the node: bytes from the address in `input` or `output` to the buffer of the rank. Null: no offset.
  const int64_t* input_at = nullptr;
  const int64_t* output_at = nullptr;
  // Copies between XLA's buffers and this rank's part of `input` and `output`: before the entry barrier and after the
  // exit barrier. Peers of a channel access only elements of that channel. So each channel copies its own elements and
  // waits for no other channel.
  BufferCopy copy_in;
  BufferCopy copy_out;
  const ProgramStep* steps = nullptr;
  const Place* sources = nullptr;
  const ChannelProgram* channels = nullptr;
  Operation operation;
  int32_t item_bytes = 1;
  int32_t ranks_per_node = 1;
  BulkStages bulk;  // of the rank's own kernel; ranks may differ
};

// A buffer of `num` blocks, in elements. See BlockLayout in ffi/cpu/copy.h.
struct LlBlocks {
  int32_t num = 1;
  int32_t contiguous_count = 1;

  JAXCOMM_BOTH int64_t Position(int32_t block, int32_t element) const {
    const int64_t row = element / contiguous_count;
    return (row * (num - 1) + block) * contiguous_count + element;
  }
};

// One rank's call. Plain data. Pointers point to device memory.
struct LlArgs {
  device::Comm comm;
  const char* x = nullptr;
  char* y = nullptr;
  LlBlocks input;
  LlBlocks output;
  int32_t block_count = 0;
  int32_t num_channels = 1;
  Operation operation;     // only if `reduces`
  int32_t item_bytes = 1;  // 1, 2, 4 or 8: larger elements are split in two
  bool reduces = false;    // the output is one block of sums; else one block from every rank
  bool two_shot = false;   // every rank reduces its share of the block and then sends it to all ranks
};

// One rank's call. Plain data. Pointers point to device memory. The arena of `comm` has at least MultimemBytes.
struct MultimemArgs {
  device::Comm comm;
  const char* x = nullptr;
  char* y = nullptr;
  ChannelSlice input;  // all elements of every block
  ChannelSlice output;
  DType dtype = DType::kF32;  // type of sums
  int32_t item_bytes = 1;
  int32_t num_channels = 1;
  bool reduces = false;  // exchanges sums; else blocks without change
  bool to_all = false;   // results go to all ranks; else to the rank that loads them
};

constexpr int64_t kMultimemUnitBytes = 16;

// Units of a block in the arena. The content of the last unit's padding is arbitrary.
JAXCOMM_BOTH int64_t MultimemUnits(const MultimemArgs& args) {
  return (args.input.count * args.item_bytes + kMultimemUnitBytes - 1) / kMultimemUnitBytes;
}

// Bytes of all blocks in the arena.
JAXCOMM_BOTH int64_t MultimemBytes(const MultimemArgs& args) {
  const int64_t blocks = args.input.num_blocks * args.output.num_blocks;  // one of the two factors is 1
  return blocks * MultimemUnits(args) * kMultimemUnitBytes;
}

}  // namespace jaxcomm::cuda
