// How the processes of a host share the memory that a program needs: which buffers peers see through windows of shared
// memory, and where everything lies in the block that each process brings to a call.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <vector>

#include "executor.h"

namespace jaxcomm {

class InterProcessProgram {
 public:
  // process_of, node_of: by position in the group. single_copy: processes of a node may read each other's memory.
  // Counts in elements.
  InterProcessProgram(std::shared_ptr<const Program> program, std::vector<int32_t> process_of,
                      std::vector<int32_t> node_of, bool single_copy, int64_t input_count, int64_t output_count);

  const std::shared_ptr<const Program>& program() const { return program_; }
  const std::vector<int32_t>& process_of() const { return process_of_; }
  const std::vector<int32_t>& node_of() const { return node_of_; }
  int32_t num_ranks() const { return static_cast<int32_t>(process_of_.size()); }
  int64_t input_bytes() const { return input_bytes_; }
  int64_t output_bytes() const { return output_bytes_; }

  // Peers never write to a buffer of XLA's, because its owner may abort and free it at any time. So an output that is
  // written by peers of the node, and every small buffer that they read, is copied to or from a window: a copy in a
  // block. In the window of an output, block follows block. Messages of other nodes are received by the owner itself:
  // straight into an output, if it lies in that order.
  const BlockLayout& output_layout() const { return output_layout_; }  // of XLA's buffer
  bool windowed(Space space) const { return windowed_[static_cast<size_t>(space)]; }

  // Of the block that a process brings.
  uint64_t block_bytes(int32_t process) const;
  // Offsets in the block of a position's process.
  uint64_t addresses(int32_t position) const { return offsets_[position].addresses; }  // input, output: uint64_t[2]
  uint64_t signals(int32_t position) const { return offsets_[position].signals; }      // atomic<uint32_t>[num_ranks]
  uint64_t window(Space space, int32_t position) const {
    return offsets_[position].windows[static_cast<size_t>(space)];
  }

  // Of everything that all processes must agree on.
  uint64_t fingerprint() const { return fingerprint_; }

 private:
  struct RankOffsets {
    uint64_t addresses = 0;
    uint64_t signals = 0;
    std::array<uint64_t, 3> windows = {};
    uint64_t end = 0;
  };

  std::shared_ptr<const Program> program_;
  std::vector<int32_t> process_of_;
  std::vector<int32_t> node_of_;
  BlockLayout output_layout_;
  int64_t input_bytes_;
  int64_t output_bytes_;
  std::array<bool, 3> windowed_ = {};
  std::vector<RankOffsets> offsets_;
  uint64_t fingerprint_;
};

}  // namespace jaxcomm
