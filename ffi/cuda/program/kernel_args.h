// Arguments of the kernels. Plain data: the host fills them in without CUDA.
#pragma once

#include <cstdint>

#include "common/dtype.h"
#include "cuda/program/program.h"
#include "include/jaxcomm/comm.h"

namespace jaxcomm {
namespace cuda {

// What a program's elements are, and what its reduce steps do with them.
struct Operation {
  DType dtype = DType::kF32;
  ReduceOp op = ReduceOp::kSum;
};

// A buffer that the kernel copies, laid out alike at both places. Nothing if `to` is null.
struct BufferCopy {
  char* to = nullptr;
  const char* from = nullptr;
};

// One rank's call. Plain data; pointers are to memory of the device.
struct RankArgs {
  device::Comm comm;
  device::Window input;  // of the ranks of the node; own only where the program does not share it
  device::Window output;
  device::Window scratch;
  // By rank of the node: bytes from where `input` and `output` say to where the rank's memory is. Null: it is there.
  const int64_t* input_at = nullptr;
  const int64_t* output_at = nullptr;
  // Of XLA's buffers and the rank's own part of `input` and `output`: before it enters, after it has left. Peers of a
  // channel read and write elements of that channel alone, so each copies its own, and no channel waits for another.
  BufferCopy copy_in;
  BufferCopy copy_out;
  const ProgramStep* steps = nullptr;
  const Place* sources = nullptr;
  const ChannelProgram* channels = nullptr;
  Operation operation;
  int32_t item_bytes = 1;
  int32_t ranks_per_node = 1;
};

// A buffer of `num` blocks, in elements; BlockLayout of ffi/cpu/copy.h.
struct LlBlocks {
  int32_t num = 1;
  int32_t run = 1;

  JAXCOMM_BOTH int64_t Position(int32_t block, int32_t element) const {
    const int64_t row = element / run;
    return (row * (num - 1) + block) * run + element;
  }
};

// One rank's call. Plain data; pointers are to memory of the device.
struct LlArgs {
  device::Comm comm;
  const char* x = nullptr;
  char* y = nullptr;
  LlBlocks input;
  LlBlocks output;
  int32_t block_count = 0;
  int32_t num_channels = 1;
  Operation operation;     // reduces only
  int32_t item_bytes = 1;  // 1, 2, 4 or 8: larger elements are taken as two
  bool reduces = false;    // one block of output, of the sums; else one from every rank
  bool two_shot = false;   // reduces: every rank a piece of the block, and then sends it to all
};

// One rank's call. Plain data; pointers are to memory of the device. Comm's arena has MultimemBytes.
struct MultimemArgs {
  device::Comm comm;
  const char* x = nullptr;
  char* y = nullptr;
  ChannelSlice input;  // all of every block
  ChannelSlice output;
  DType dtype = DType::kF32;  // of sums
  int32_t item_bytes = 1;
  int32_t num_channels = 1;
  bool reduces = false;  // what is exchanged are sums; else blocks as they are
  bool to_all = false;   // it goes to all ranks; else to the one that loads it
};

constexpr int64_t kMultimemUnitBytes = 16;

// A block's units in the arena; the last one may be filled up with anything.
JAXCOMM_BOTH int64_t MultimemUnits(const MultimemArgs& args) {
  return (args.input.count * args.item_bytes + kMultimemUnitBytes - 1) / kMultimemUnitBytes;
}

// Of all blocks that lie in the arena.
JAXCOMM_BOTH int64_t MultimemBytes(const MultimemArgs& args) {
  const int64_t blocks = args.input.num_blocks * args.output.num_blocks;  // one of them is 1
  return blocks * MultimemUnits(args) * kMultimemUnitBytes;
}

}  // namespace cuda
}  // namespace jaxcomm
