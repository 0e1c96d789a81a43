// From the attributes of a call site and the sizes of its buffers to a program.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "../common/dtype.h"
#include "../common/status.h"
#include "../plan/cost.h"
#include "../plan/plan.h"
#include "executor.h"

namespace jaxcomm {

// How the ranks of a group reach each other.
enum class Reach : uint8_t { kProcess, kNode, kNetwork };  // one process; several of a node; several nodes
constexpr int kNumReaches = 3;

// What the cost model knows of this machine for each reach: constants, or what jaxcomm.calibrate() has found.
struct Figures {
  std::array<Machine, kNumReaches> machines;

  static Figures Current();
  static void Set(const Figures& figures);
};

// What the attributes of a custom call say.
struct CallSpec {
  std::string op;    // public name, for messages
  std::string site;  // where the user called it, for messages
  Collective collective = Collective::kBarrier;
  ReduceOp reduce_op = ReduceOp::kSum;
  std::string algorithm;           // empty: choose
  std::vector<int64_t> groups;     // logical device ids, group after group
  std::vector<int32_t> processes;  // of these devices; empty: all are of this process
  uint64_t identity = 0;           // of the call site: the same in all processes
  int64_t group_size = 1;
  int64_t ranks_per_node = 1;
  int64_t max_sms = 0;    // of a GPU, each for a channel; 0: as many as there are
  int64_t input_run = 0;  // Layout::run of blocked inputs and outputs, elements; 0: block after block
  int64_t output_run = 0;
  int32_t root = 0;                // broadcast
  std::vector<int32_t> source_of;  // permute
  // Of the moment when the program was made, which is the same in the course of all processes.
  Figures figures = Figures::Current();
};

// Processors that this process may use.
int64_t NumProcessors();

// What a group's ranks share.
struct Host {
  Reach reach = Reach::kProcess;
  int64_t num_processors = NumProcessors();  // of each node
};

// A group as the cost model sees it.
Machine MachineOf(const Figures& figures, const Host& host, int64_t num_ranks, int64_t ranks_per_node);

bool Reduces(Collective collective);

// What a call with buffers of so many elements asks of its group. Fails if they don't fit.
StatusOr<Request> MakeRequest(const CallSpec& spec, const Geometry& geometry, int64_t input_count,
                              int64_t output_count);

// Fails if the type can't be reduced or no algorithm fits.
StatusOr<std::shared_ptr<const Program>> MakeProgram(const CallSpec& spec, const Host& host, DType dtype,
                                                     int64_t input_count, int64_t output_count);

}  // namespace jaxcomm
