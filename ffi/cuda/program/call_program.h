// A call of a collective on a GPU, as far as it can be told without one: its program, where its buffers lie in the
// arena, what the kernel gets, and what an error says.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "common/call_spec.h"
#include "cuda/program/kernel_args.h"
#include "cuda/program/program.h"
#include "cuda/program/send_recv_schedule.h"
#include "plan/select_for_gpus.h"

namespace jaxcomm {
namespace cuda {

// Bytes from the start of a rank's arena. Input and output are there only if the program shares them; else the kernel
// works in XLA's buffers. The same on all ranks.
struct ArenaLayout {
  int64_t input = 0;
  int64_t output = 0;
  int64_t scratch = 0;
  int64_t bytes = 0;  // of all of it
};

struct CallProgram {
  RankProgram program;
  ArenaLayout arena;
  // Without a Comm. Instead of a program and an arena; kMultimem has an arena of its own.
  std::optional<LlArgs> ll;
  std::optional<MultimemArgs> multimem;
  Operation operation;
  int64_t item_bytes = 1;
  int64_t input_bytes = 0;
  int64_t output_bytes = 0;

  SendRecvSchedule schedule;  // of groups of several nodes
  int32_t num_channels = 0;   // of whatever there is

  // A group or a buffer of nothing to exchange.
  bool empty() const { return program.steps.empty() && schedule.actions.empty() && !ll && !multimem; }
};

// The placement of a rank in a group. Ranks of a node, which all address each other's memory, follow each other.
struct RankPlacement {
  int32_t rank = 0;
  int32_t ranks_per_node = 1;
  InterNode inter_node = InterNode::kSendRecv;
};

// The program of one rank. At most `max_channels` channels, or spec.max_sms if that is less. False, and `error` filled
// in, if the buffers, the type or the algorithm don't fit.
bool MakeCallProgram(const CallSpec& spec, DType dtype, int64_t input_count, int64_t output_count,
                     RankPlacement placement, int32_t max_channels, CallProgram* call, std::string* error,
                     SplitLimits limits = {});

// What does not change from call to call, but for the Comm.
LlArgs MakeLlArgs(const Request& request, Runs runs, Operation operation, int32_t num_channels, bool two_shot);
LlArgs WithBuffers(LlArgs args, const void* x, void* y);

// The same for calls by multimem.
MultimemArgs MakeMultimemArgs(const Request& request, Runs runs, DType dtype, int32_t num_channels);
MultimemArgs WithBuffers(MultimemArgs args, const void* x, void* y);

// Where the vectors of a RankProgram are in memory of the device, one after the other in one allocation.
struct ProgramImage {
  explicit ProgramImage(const RankProgram& program);

  std::vector<char> bytes;
  int64_t sources = 0;  // where they begin; steps do at 0
  int64_t channels = 0;
};

// What does not change from call to call: all but `input` and `output` where the program does not share them. `image`
// is where a ProgramImage has been copied to.
RankArgs MakeArgs(const CallProgram& call, const device::Comm& comm, const char* image, const ProgramImage& layout);
// For walk `walk` of a program with rounds; without, there is one. Copies nothing.
RankArgs OfWalk(const CallProgram& call, RankArgs args, int32_t walk);
// With this call's buffers of XLA's.
RankArgs WithBuffers(const CallProgram& call, RankArgs args, const void* x, void* y);

// The window of memory that begins at addresses[i] at rank i. False, and `error` filled in, if these are not equally
// spaced.
bool MakeWindow(const std::vector<char*>& addresses, device::Window* window, std::string* error);

// Where a program was: "in the entry barrier", "in step 3", "in the exit barrier".
std::string PhaseText(int32_t step);

// "30 s (JAXCOMM_TIMEOUT_S)"
std::string TimeoutText(double timeout_s);

// Why a kernel aborted. `call`: op and place of the call.
std::string FailureText(const device::Report& report, const std::string& call, double timeout_s);

}  // namespace cuda
}  // namespace jaxcomm
