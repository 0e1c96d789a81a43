// The parts of a GPU call that need no CUDA: its program, the layout of its buffers in the arena, the kernel arguments,
// and the error texts.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "common/call_spec.h"
#include "cuda/program/assign_or_return.h"
#include "cuda/program/inter_node_row_args.h"
#include "cuda/program/kernel_args.h"
#include "cuda/program/program.h"
#include "cuda/program/row_args.h"
#include "cuda/program/slice_args.h"
#include "plan/channels.h"

namespace jaxcomm::cuda {

// Byte offsets in the arena of a rank, equal on all ranks. Input and output are in the arena only if the program shares
// them. Otherwise the kernel uses XLA's buffers.
struct ArenaLayout {
  int64_t input = 0;
  int64_t output = 0;
  int64_t scratch = 0;
  int64_t bytes = 0;  // total size
};

struct CallProgram {
  RankProgram program;
  ArenaLayout arena;
  // Arguments of an LL or multimem call, of a dispatch or combine, of a dispatch between nodes, or of an all_to_all_v,
  // without a Comm. They replace `program` and the layout of the arena.
  std::optional<LlArgs> ll;
  std::optional<MultimemArgs> multimem;
  std::optional<RowArgs> rows;
  std::optional<InterNodeRowArgs> inter_node_rows;
  std::optional<SliceArgs> slices;
  Operation operation;
  int64_t item_bytes = 1;
  int64_t input_bytes = 0;
  int64_t output_bytes = 0;

  int32_t num_channels = 0;  // of the program or of the arguments that replace it

  // True if the call needs no kernel.
  bool empty() const { return program.steps.empty() && !ll && !multimem && !rows && !inter_node_rows && !slices; }
};

// The placement of a rank in a group. The ranks of a node have consecutive numbers and all address each other's memory.
// GIN connects the nodes of a group of several.
struct RankPlacement {
  int32_t rank = 0;
  int32_t ranks_per_node = 1;
};

// Makes the program of one rank, with at most `max_channels` and at most spec.max_sms channels. `in_place`: peers
// access the operand and the result where XLA has them, so the call does not stage them. Fails if the buffers, the
// element type or the algorithm do not fit the call.
StatusOr<CallProgram> MakeCallProgram(const CallSpec& spec, DType dtype, int64_t input_count, int64_t output_count,
                                      RankPlacement placement, int32_t max_channels, bool in_place = false);

// Makes the arguments that are equal in all executions of a call, except for the Comm.
LlArgs MakeLlArgs(const Request& request, ContiguousCounts contiguous, Operation operation, int32_t num_channels,
                  bool two_shot);
MultimemArgs MakeMultimemArgs(const Request& request, ContiguousCounts contiguous, DType dtype, int32_t num_channels);
// Adds XLA's buffers of this execution.
template <typename LlOrMultimemArgs>
LlOrMultimemArgs WithBuffers(LlOrMultimemArgs args, const void* x, void* y) {
  args.x = static_cast<const char*>(x);
  args.y = static_cast<char*>(y);
  return args;
}

// The vectors of a RankProgram for device memory, one after the other in one allocation.
struct ProgramImage {
  explicit ProgramImage(const RankProgram& program);

  std::vector<char> bytes;
  int64_t sources = 0;  // byte offset; steps begin at 0
  int64_t channels = 0;
};

// Makes the arguments that are equal in all executions of a call: all except `input` and `output` that the program does
// not share. `image` is the device address of the ProgramImage.
RankArgs MakeArgs(const CallProgram& call, const device::Comm& comm, const char* image, const ProgramImage& layout);
// Adds XLA's buffers of this execution.
RankArgs WithBuffers(const CallProgram& call, RankArgs args, const void* x, void* y);

// Returns the window whose memory begins at addresses[i] on rank i. Fails if the addresses are not equally spaced.
StatusOr<device::Window> MakeWindow(const std::vector<char*>& addresses);

// Describes a position in a program: "in the entry barrier", "in step 3", "in the exit barrier".
std::string PhaseText(int32_t step);

// "30 s (JAXCOMM_TIMEOUT_S)"
std::string TimeoutText(double timeout_s);

// Explains why a kernel aborted. `call`: op and call site.
std::string FailureText(const device::Report& report, const std::string& call, double timeout_s);

}  // namespace jaxcomm::cuda
