// Programs made from attributes and buffer sizes, against definitions by rows and columns.
#include <random>
#include <string>
#include <vector>

#include "../../ffi/cpu/inter_process_program.h"
#include "../../ffi/cpu/planner.h"
#include "../../ffi/plan/algorithms.h"
#include "../../ffi/plan/resolve.h"
#include "participants.h"

namespace jaxcomm {
namespace {

constexpr int64_t kRanks = 4, kCount = 48;

// Of one call of all ranks, in one process, with operands of kCount elements: the error that each gets.
std::string ErrorOf(CallSpec spec, int64_t output_count, DType dtype = DType::kS32) {
  CompletionPool::Get().EnsureThreads(kRanks);
  Rendezvous::SetLimits({60, 60});
  const std::shared_ptr<Rendezvous> site = ValueOf(Rendezvous::Make(std::move(spec)));
  const std::vector<int32_t> in(kCount);
  std::vector<int32_t> out(output_count);
  Counter counter;
  static int64_t run = 0;
  ++run;  // the failure of a run ends all its calls
  for (int64_t r = 0; r < kRanks; ++r) {
    Participant participant = MakeParticipant(run, r, in.data(), out.data(), kCount, output_count);
    participant.dtype = dtype;
    site->Arrive(participant, std::make_unique<CountCompletion>(counter));
  }
  CHECK(counter.WaitFor(kRanks));
  const std::vector<std::string> errors = counter.errors();
  CHECK(errors.size() == kRanks);
  for (const std::string& error : errors) CHECK(error == errors[0]);
  return errors[0];
}

CallSpec SpecOf(Collective collective) { return Spec(collective, kRanks, kRanks, "op"); }

TEST_CASE("drawn calls: the executor runs the plans of the Resolution") {
  std::mt19937_64 random(20261124);
  int made = 0;
  for (int i = 0; i < 3000; ++i) {
    const CollectiveTraits& traits = Collectives()[random() % Collectives().size()];
    const int64_t per_node = 1 + random() % 4, n = per_node * (1 + random() % 3);
    CallSpec spec = Spec(traits.collective, n, n, "op");
    spec.ranks_per_node = per_node;
    const auto& table = Algorithms(traits.collective);
    if (random() % 2 == 0) spec.algorithm = table[random() % table.size()].name;
    spec.root = static_cast<int32_t>(random() % n);
    for (int64_t r = 0; r < n; ++r) spec.source_of.push_back(static_cast<int32_t>((r + 1) % n));
    spec.row_count = 1 + random() % 3;
    spec.choices = 2;
    spec.num_experts = 2 * n;
    spec.per_choice = random() % 2;
    spec.home = random() % 2;
    spec.weighted = random() % 2;
    const int64_t block = random() % 2 == 0 ? random() % 100 : random() % 100'000;
    const auto count = [&](BufferBlocks blocks) {
      return blocks == BufferBlocks::kPerRank ? n * block : blocks == BufferBlocks::kOne ? block : 0;
    };
    const int64_t rows = traits.OfLists() ? spec.row_count : 1;
    const int64_t input = rows * count(traits.input), output = rows * count(traits.output);
    const NodeResources resources = {static_cast<Scope>(random() % kNumScopes), 2};
    const DType dtype = std::vector{DType::kBF16, DType::kF32, DType::kF64}[random() % 3];
    Capabilities cpu;
    cpu.machine = MachineOf(CostParams::Current(), resources, n, per_node);
    const StatusOr<Resolution> expected = Resolve(spec, {dtype, input, output}, {resources.scope, per_node}, cpu);
    const auto program = MakeProgram(spec, CostParams::Current(), resources, dtype, input, output);
    CHECK(expected.ok() == program.ok());
    if (!program.ok()) continue;
    ++made;
    if (traits.SumsTokens()) {
      CHECK((*program)->tokens.weight_bytes == (spec.weighted == 0 ? 0 : dtype == DType::kF64 ? 8 : 4));
    }
    auto same = std::make_shared<Program>(**program);
    same->plans = BuildAll(*expected->plan, expected->request);
    const auto fingerprint = [&](const std::shared_ptr<const Program>& of) {
      return InterProcessProgram(of, std::vector<int32_t>(n), std::vector<int32_t>(n), false, input, output)
          .fingerprint();
    };
    CHECK(fingerprint(*program) == fingerprint(same));
  }
  CHECK(made > 1500);
  CallSpec sum = SpecOf(Collective::kReduceScatter);
  sum.algorithm = "direct";  // each of 4 ranks reads 12 elements of each one
  const auto program = ValueOf(MakeProgram(sum, CostParams::Current(), {}, DType::kF32, 48, 12));
  CHECK(program->moved_bytes == 4 * 12 * 4 * 4);
}

TEST_CASE("invalid calls get an error with the reason") {
  const std::string prefix = "jaxcomm: op at test_rendezvous.cc: ";
  CHECK(ErrorOf(SpecOf(Collective::kAllGather), 7) ==
        prefix + "buffers of 48 and 7 elements do not match a group of 4 ranks");
  CHECK(ErrorOf(SpecOf(Collective::kReduceScatter), 13) ==
        prefix + "buffers of 48 and 13 elements do not match a group of 4 ranks");
  for (const int64_t count : {5, 24}) {  // not a divisor of the block of 12; larger than the block
    CallSpec blocked = SpecOf(Collective::kAllToAll);
    blocked.input_contiguous_count = count;
    const std::string why =
        prefix + "blocks of 12 elements cannot be split into contiguous fragments of " + std::to_string(count);
    CHECK(ErrorOf(blocked, 48) == why);
    std::swap(blocked.input_contiguous_count, blocked.output_contiguous_count);
    CHECK(ErrorOf(blocked, 48) == why);
  }
  CallSpec spec = SpecOf(Collective::kAllReduce);
  spec.reduce_op = ReduceOp::kMax;
  CHECK(ErrorOf(spec, 48, DType::kC64) == prefix + "elements of complex64 cannot be reduced by this operation");
  spec.reduce_op = ReduceOp::kSum;
  CHECK(ErrorOf(spec, 48, DType::kF8E8M0FNU) ==
        prefix + "elements of float8_e8m0fnu cannot be reduced by this operation");
  spec.algorithm = "no such";
  for (spec.asynchronous = 0; spec.asynchronous <= 1; ++spec.asynchronous) {  // 1: a worker fails the call
    CHECK(ErrorOf(spec, 48).find(prefix) == 0 && ErrorOf(spec, 48).find("no such") != std::string::npos);
  }
  const auto make = [](CallSpec bad) { return Rendezvous::Make(std::move(bad)).status().message(); };
  spec.processes.assign(kRanks, 0);
  CHECK(make(spec) == "op: this process is not connected to the others; call jaxcomm.register()");
  CHECK(make(Spec(Collective::kAllReduce, 4, 3, "op")) == "op: 4 ranks cannot be split into groups of 3");
  CHECK(make(Spec(Collective::kAllReduce, 4, 0, "op")) == "op: 4 ranks cannot be split into groups of 0");
  spec = SpecOf(Collective::kAllReduce);
  spec.ranks_per_node = 3;
  CHECK(make(spec) == "op: groups of 4 ranks cannot be split into nodes of 3");
  spec.ranks_per_node = 0;
  CHECK(make(spec) == "op: groups of 4 ranks cannot be split into nodes of 0");
}

TEST_CASE("without calibration, a step in a host takes less than a microsecond, between hosts some tens") {
  const CostParams defaults = CostParams::Current();
  for (const Scope scope : {Scope::kProcess, Scope::kNode, Scope::kNetwork}) {
    for (const Link link : {Link::kSelf, Link::kNode}) {
      const LinkModel& model = defaults.machines[static_cast<size_t>(scope)].links[static_cast<size_t>(link)];
      CHECK(model.overhead_s > 0 && model.overhead_s + model.latency_s < 1e-6);
    }
    CHECK(defaults.machines[static_cast<size_t>(scope)].shared_network);
  }
  const LinkModel& network =
      defaults.machines[static_cast<size_t>(Scope::kNetwork)].links[static_cast<size_t>(Link::kNetwork)];
  CHECK(network.overhead_s > 1e-6 && network.overhead_s < 1e-4);
  CHECK(network.bytes_per_s > 1e8 && network.bytes_per_s < 1e10);
}

// Ranks that share a processor take turns. In one process and on one node, all ranks of a group share the processors;
// between nodes, the ranks of each node.
TEST_CASE("the machine of a group") {
  CostParams cost_params;
  for (int scope = 0; scope < kNumScopes; ++scope) cost_params.machines[scope].launch_s = scope + 1;
  NodeResources resources;
  resources.num_processors = 4;
  const auto per_processor = [&](Scope scope, int64_t ranks, int64_t ranks_per_node) {
    resources.scope = scope;
    const Machine machine = MachineOf(cost_params, resources, ranks, ranks_per_node);
    CHECK(machine.launch_s == static_cast<double>(scope) + 1);
    CHECK(machine.most_message_bytes == (scope == Scope::kNetwork ? 512 << 10 : Machine().most_message_bytes));
    return machine.ranks_per_processor;
  };
  CHECK(per_processor(Scope::kProcess, 16, 8) == 4);
  CHECK(per_processor(Scope::kNode, 16, 8) == 4);
  CHECK(per_processor(Scope::kNetwork, 16, 8) == 2);
  CHECK(per_processor(Scope::kNetwork, 16, 6) == 1.5);
  CHECK(per_processor(Scope::kProcess, 2, 2) == 1);  // never less, because idle processors do not help
}

}  // namespace
}  // namespace jaxcomm
