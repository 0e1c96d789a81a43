// How the processes of a host share the memory that a program needs: which buffers peers access through windows of
// shared memory, and the layout of the block that each process contributes to a call.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <vector>

#include "cpu/executor.h"

namespace jaxcomm {

class InterProcessProgram {
 public:
  // process_of, node_of: by position in the group. single_copy: processes of a node may read each other's memory.
  // Counts in elements. attributes: a hash of those of the call, which are part of the fingerprint.
  InterProcessProgram(std::shared_ptr<const Program> program, std::vector<int32_t> process_of,
                      std::vector<int32_t> node_of, bool single_copy, int64_t input_count, int64_t output_count,
                      uint64_t attributes = 0);

  const std::shared_ptr<const Program>& program() const { return program_; }
  const std::vector<int32_t>& process_of() const { return process_of_; }
  const std::vector<int32_t>& node_of() const { return node_of_; }
  int32_t num_ranks() const { return static_cast<int32_t>(process_of_.size()); }
  int64_t input_bytes() const { return input_bytes_; }
  int64_t output_bytes() const { return output_bytes_; }

  // Peers never write to XLA's buffers, because the owner may abort and free them at any time. A window is a copy of a
  // buffer in shared memory. Outputs that peers of the node write have a window, and so has every small buffer that
  // they read. In the window of an output, each block is contiguous. The owner itself receives messages from other
  // nodes: directly into the output if its blocks are contiguous.
  View output(int32_t position, char* data) const;  // XLA's buffer
  int64_t output_count(int32_t position) const;     // elements that the plans may write
  bool windowed(Space space) const { return windowed_[static_cast<size_t>(space)]; }

  // Bytes of the input of a rank that other ranks may read: in a combine, up to the last row of the last group; in a
  // reshard, those of its box.
  int64_t ReadBytes(int32_t position, const Slices& slices) const;

  // Size of the block that a process contributes.
  uint64_t block_bytes(int32_t process) const;
  // Offsets in the block of the process that runs the rank at `position`.
  uint64_t addresses(int32_t position) const { return offsets_[position].addresses; }  // input, output: uint64_t[2]
  uint64_t signals(int32_t position) const { return offsets_[position].signals; }      // atomic<uint32_t>[num_ranks]
  // dispatch: RankBuffers::index, which ranks of other processes read; 0 bytes elsewhere.
  uint64_t lists(int32_t position) const { return offsets_[position].lists; }
  int64_t lists_bytes() const { return lists_bytes_; }
  // all_to_all_v: windows of outputs start with the values of the outputs.
  bool keeps_output() const { return program_->of_lists() && !of_tokens() && windowed(Space::kOutput); }
  bool of_tokens() const { return program_->tokens.choices > 0; }  // dispatch or combine
  uint64_t window(Space space, int32_t position) const {
    return offsets_[position].windows[static_cast<size_t>(space)];
  }

  // Hash of all that the processes must agree on before the call: plans, sizes and attributes.
  uint64_t fingerprint() const { return fingerprint_; }

 private:
  struct RankOffsets {
    uint64_t addresses = 0;
    uint64_t signals = 0;
    uint64_t lists = 0;
    std::array<uint64_t, 3> windows = {};
    uint64_t end = 0;
  };

  std::shared_ptr<const Program> program_;
  std::vector<int32_t> process_of_;
  std::vector<int32_t> node_of_;
  BlockLayout output_layout_;
  int64_t input_bytes_;
  int64_t output_bytes_;
  int64_t lists_bytes_ = 0;
  std::array<bool, 3> windowed_ = {};
  std::vector<RankOffsets> offsets_;
  uint64_t fingerprint_;
};

}  // namespace jaxcomm
