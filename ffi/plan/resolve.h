// The one decision about a call: which back end runs it, by which algorithm and protocol, on how many channels, at
// which predicted cost, and why.
//
// Lowering resolves each call site once. On GPUs, the first execution resolves it again, with the nodes that NCCL has
// found. explain() prints the Resolution, and the simulator times its plan. No other code decides whether jaxcomm or
// XLA runs a call.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "common/call_spec.h"
#include "common/dtype.h"
#include "common/status.h"
#include "plan/algorithms.h"
#include "plan/channels.h"
#include "plan/cost.h"
#include "plan/request.h"
#include "plan/row_limits.h"

namespace jaxcomm {

enum class Platform : uint8_t { kCpu, kCuda, kOther };  // kOther: jaxcomm has no handlers there

enum class Backend : uint8_t {
  kXla,          // XLA's own collective
  kComposition,  // XLA's own collectives over node groups and rail groups: algorithm "xla_hierarchical"
  kPlan,         // a plan, or the LL or multimem kernel that gives its result
  kRows,         // GPUs: the kernels of all_to_all_v, dispatch and combine
};

// How the kernels of GPUs run a plan. The self-test has a row for each (jaxcomm/_selftest_programs.py).
enum class Feature : uint8_t {
  kSteps,      // step by step, on arenas of the whole operand and result or on XLA's buffers
  kStaging,    // step by step, through a ring of chunks (staging.h)
  kLl,         // LL messages of blocks
  kLlTwoShot,  // LL messages of parts of blocks, in two exchanges
  kMultimem,   // NVLink SHARP
};
constexpr const char* kFeatures[] = {"steps", "staging", "ll", "ll_two_shot", "multimem"};  // names, in this order

// Calls for which the self-test has measured one plan as faster than XLA's collective on these GPUs: at both sizes, and
// at all sizes that it has measured between them.
struct Measured {
  Collective collective = Collective::kBarrier;  // dispatch: combine, too, so that one back end runs a layer
  DType dtype = DType::kF32;                     // of sums; the types of other collectives do not matter
  int64_t num_ranks = 0;                         // of the group
  int64_t ranks_per_node = 0;                    // of the group, on one host
  int64_t min_bytes = 0;  // of the operand of a rank; of dispatch: of a row for each choice of its tokens
  int64_t max_bytes = 0;  // inclusive
  std::string algorithm;  // of the plan; empty: all_to_all_v and dispatch, which have one kernel for each placement
};

// Settings, versions and records: what a platform can do apart from this call.
struct Capabilities {
  Platform platform = Platform::kCpu;
  std::string setting;                 // JAXCOMM_ALGORITHM: "", "xla" or "plans"
  std::vector<Measured> measured;      // GPUs: what runs these calls by default; XLA's collectives run others
  std::vector<Feature> passed;         // GPUs: of plans, in the self-test; the others do not run by default
  bool tested_between_nodes = false;   // GPUs: the self-test has passed between nodes with GIN
  bool measured_one_exchange = false;  // GPUs: the self-test has found the kernel of route_and_dispatch to be faster
  bool multimem = false;               // GPUs: a node may have NVLink SHARP
  bool in_place = false;               // GPUs: peers access operands and results where XLA has them
  int32_t max_channels = 1;            // GPUs: of the lane of the call
  std::optional<Machine> machine;      // cost model of a rank; none: GpuMachine()
};

// Where the ranks of a group are.
struct Placement {
  Scope scope = Scope::kProcess;  // CPUs
  int64_t ranks_per_node = 1;
  // GPUs: NCCL has reported the nodes and GIN between them. Before the run, `ranks_per_node` is the number of ranks of
  // a host, and NVLink may connect several hosts.
  bool found = true;
  bool gin = false;  // GPUs, several nodes: kernels put over the network
};

// The buffers of one rank: elements of the first operand and of the result.
struct Shapes {
  DType dtype = DType::kF32;
  int64_t input_count = 0;
  int64_t output_count = 0;
  int64_t choices = 0;      // dispatch, combine: of all tokens of a rank
  int64_t list_bytes = -1;  // all_to_all_v, dispatch, combine: from one rank to another; -1: an even share of all rows
};

struct Resolution {
  Backend backend = Backend::kXla;
  std::string algorithm;  // "xla", "xla_hierarchical", or a name of Algorithms()
  std::string reason;     // for users: "asked for", or "lowest predicted cost of 5: ring 12.3 us, ..."
  // GPUs, jaxcomm's kernels: what XLA would do with its own collective, and does not do with this call. May be empty.
  std::string lost;
  // combine: the call returns the row of each choice, and the caller adds the rows of a token.
  bool returns_choices = false;
  // Only with a plan.
  const Algorithm* plan = nullptr;
  Request request;           // of one channel, with chunk_count and staged_count filled in
  Request call_request;      // of all channels, in whole blocks
  int64_t item_bytes = 1;    // of an element of the plan
  bool ll = false;           // executed by LL messages; otherwise step by step
  int32_t num_channels = 0;  // thread blocks; 0 on CPUs
  Machine machine;           // of a rank, with all channels
  Cost cost;                 // of one channel; CostOf() has that of the call
};

// Of a Resolution with a plan on GPUs.
Feature FeatureOf(const Resolution& resolution);

// Empty, or why XLA's own collectives run all calls with this argument `algorithm`, wherever their ranks are.
std::string WhyXla(const std::string& algorithm, const Capabilities& capabilities);

// Fails if the call names an algorithm that does not fit, or if no algorithm fits.
StatusOr<Resolution> Resolve(const CallSpec& spec, const Shapes& shapes, const Placement& placement,
                             const Capabilities& capabilities);

// The same for a request that is not the call of a program, of elements of `item_bytes`. Always by a plan.
StatusOr<Resolution> ResolvePlan(const Request& request, const std::string& algorithm, int64_t item_bytes,
                                 const Capabilities& capabilities);

// How route_and_dispatch sends the ids and rows of its tokens.
struct RouteAndDispatch {
  bool one_exchange = false;  // one exchange of LL messages (GPUs of a node); else route, then dispatch
  std::string reason;         // for users
};
// `named`: the user has named algorithm "one_shot", so that sizes do not matter that only cost more. `max_sms`: of the
// call; 0: none.
RouteAndDispatch ResolveRouteAndDispatch(const OneExchange& sizes, bool named, int64_t max_sms,
                                         const Placement& placement, const Capabilities& capabilities);
// Rows of a rank that one exchange sends by default.
constexpr int64_t kMaxOneExchangeBytes = 512 << 10;

// The loop of a collective matmul: "unfused" or "ring". `block_bytes`: the rows that a rank sends.
enum class MatmulProduct : uint8_t { kRows, kSums, kScatter };  // jaxcomm/matmul/loops.py
const char* ResolveCollectiveMatmul(MatmulProduct product, int64_t block_bytes, const Placement& placement,
                                    const Capabilities& capabilities);

// The cost of a call with all its channels on `machine`, by default that of the selection. `steps` counts those of one
// channel; traffic and scratch are totals of all channels, including LL flags.
Cost CostOf(const Resolution& resolution, std::optional<Machine> machine = std::nullopt);

}  // namespace jaxcomm
