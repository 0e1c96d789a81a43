// The parts of a GPU call that need no GPU: its program, the layout of its buffers in the arena, the kernel arguments,
// and the error texts.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "common/call_spec.h"
#include "common/status.h"
#include "cuda/program/kernel_args.h"
#include "cuda/program/program.h"
#include "cuda/program/send_recv_schedule.h"
#include "plan/select_for_gpus.h"

namespace jaxcomm {
namespace cuda {

// Bytes from the start of a rank's arena. Input and output are in the arena only if the program shares them. Otherwise
// the kernel uses XLA's buffers. The same on all ranks.
struct ArenaLayout {
  int64_t input = 0;
  int64_t output = 0;
  int64_t scratch = 0;
  int64_t bytes = 0;  // total size
};

struct CallProgram {
  RankProgram program;
  ArenaLayout arena;
  // Arguments of an LL or multimem call, without a Comm. They replace `program` and `arena`; multimem has its own arena
  // layout.
  std::optional<LlArgs> ll;
  std::optional<MultimemArgs> multimem;
  Operation operation;
  int64_t item_bytes = 1;
  int64_t input_bytes = 0;
  int64_t output_bytes = 0;

  SendRecvSchedule schedule;  // only for groups of several nodes
  int32_t num_channels = 0;   // of the program, the LL call or the multimem call

  // Whether there is nothing to exchange.
  bool empty() const { return program.steps.empty() && schedule.actions.empty() && !ll && !multimem; }
};

// The placement of a rank in a group. The ranks of a node have consecutive numbers and all address each other's memory.
struct RankPlacement {
  int32_t rank = 0;
  int32_t ranks_per_node = 1;
  InterNode inter_node = InterNode::kSendRecv;
};

// The program of one rank. At most `max_channels` channels, or spec.max_sms if that is less. An error if the buffers,
// the type or the algorithm do not fit.
StatusOr<CallProgram> MakeCallProgram(const CallSpec& spec, DType dtype, int64_t input_count, int64_t output_count,
                                      RankPlacement placement, int32_t max_channels, SplitLimits limits = {});

// The arguments that are the same in every call, except for the Comm.
LlArgs MakeLlArgs(const Request& request, Runs runs, Operation operation, int32_t num_channels, bool two_shot);
LlArgs WithBuffers(LlArgs args, const void* x, void* y);

// The same for multimem calls.
MultimemArgs MakeMultimemArgs(const Request& request, Runs runs, DType dtype, int32_t num_channels);
MultimemArgs WithBuffers(MultimemArgs args, const void* x, void* y);

// The vectors of a RankProgram for device memory, one after the other in one allocation.
struct ProgramImage {
  explicit ProgramImage(const RankProgram& program);

  std::vector<char> bytes;
  int64_t sources = 0;  // byte offset; steps begin at 0
  int64_t channels = 0;
};

// The arguments that are the same in every call: all but `input` and `output` if the program does not share them.
// `image` is the address of the copied ProgramImage.
RankArgs MakeArgs(const CallProgram& call, const device::Comm& comm, const char* image, const ProgramImage& layout);
// The arguments of launch number `launch` of a program with rounds; other programs have one launch. Without copy_in and
// copy_out.
RankArgs ArgsOfLaunch(const CallProgram& call, RankArgs args, int32_t launch);
// Adds XLA's buffers of this call.
RankArgs WithBuffers(const CallProgram& call, RankArgs args, const void* x, void* y);

// The window of memory that begins at addresses[i] at rank i. An error if the addresses are not equally spaced.
StatusOr<device::Window> MakeWindow(const std::vector<char*>& addresses);

// A position in a program as text: "in the entry barrier", "in step 3", "in the exit barrier".
std::string PhaseText(int32_t step);

// "30 s (JAXCOMM_TIMEOUT_S)"
std::string TimeoutText(double timeout_s);

// Explains why a kernel aborted. `call`: op and call site.
std::string FailureText(const device::Report& report, const std::string& call, double timeout_s);

}  // namespace cuda
}  // namespace jaxcomm
