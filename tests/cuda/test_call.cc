// GPU calls without a GPU: every algorithm of every collective, with its buffers in an arena as the handlers lay them
// out and the kernel emulated; spacing of windows; texts of failures; refused calls.
#include <cstring>
#include <string>

#include "../../ffi/cpu/executor.h"
#include "../../ffi/cuda/program/call_program.h"
#include "../../ffi/plan/algorithms.h"
#include "../../ffi/plan/staging.h"
#include "../check.h"
#include "fakes/node_group.h"
#include "fakes/on_cpu.h"
#include "fakes/virtual_ll.h"

namespace jaxcomm {
namespace cuda {
namespace {

bool Has(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

CallSpec SpecOf(Collective collective, int32_t num_ranks, const std::string& algorithm) {
  CallSpec spec;
  spec.op = Name(collective);
  spec.collective = collective;
  spec.algorithm = algorithm;
  spec.group_size = num_ranks;
  spec.ranks_per_node = num_ranks;
  if (collective == Collective::kPermute) {
    for (int32_t r = 0; r < num_ranks; ++r) spec.source_of.push_back((r + 1) % num_ranks);
    if (num_ranks > 2) spec.source_of[1] = -1;
  }
  spec.root = num_ranks / 2;
  return spec;
}

Request RequestOf(const CallSpec& spec, int64_t block_count) {
  Request request;
  request.collective = spec.collective;
  request.geometry = {1, static_cast<int32_t>(spec.group_size), true, true};
  request.block_count = block_count;
  request.source_of = spec.source_of;
  request.root = spec.root;
  return request;
}

struct Counts {
  int64_t input = 0, output = 0;
};

Counts CountsOf(Collective collective, int32_t num_ranks, int64_t block_count) {
  const Request request = RequestOf(SpecOf(collective, num_ranks, ""), block_count);
  return {InputCount(request), OutputCount(request)};
}

CallProgram Made(const StatusOr<CallProgram>& call) {
  CHECK(call.ok());
  return *call;
}

// Every rank's arena in one run of memory, as windows are; if `moved`, what ranks share lies elsewhere, wherever that
// is. Returns how many bytes of the arenas there were.
int64_t RunCall(const CallSpec& spec, int64_t block_count, int32_t max_channels, bool moved = false) {
  const auto n = static_cast<int32_t>(spec.group_size);
  const Counts counts = CountsOf(spec.collective, n, block_count);
  std::vector<CallProgram> calls(n);
  std::vector<std::vector<int32_t>> inputs, outputs;
  for (int32_t r = 0; r < n; ++r) {
    calls[r] = Made(MakeCallProgram(spec, DType::kS32, counts.input, counts.output, {r, n}, max_channels));
    // Ranks must agree on all of it without asking each other.
    CHECK(calls[r].arena.bytes == calls[0].arena.bytes && calls[r].arena.input == calls[0].arena.input);
    CHECK(calls[r].arena.output == calls[0].arena.output && calls[r].arena.scratch == calls[0].arena.scratch);
    CHECK(calls[r].program.shares_input == calls[0].program.shares_input);
    CHECK(calls[r].program.shares_output == calls[0].program.shares_output);
    CHECK(calls[r].empty() == calls[0].empty() && calls[r].ll.has_value() == calls[0].ll.has_value());
    CHECK(calls[r].num_channels == calls[0].num_channels && calls[r].num_channels <= max_channels);
    inputs.emplace_back(counts.input);
    for (int64_t i = 0; i < counts.input; ++i) inputs[r][i] = static_cast<int32_t>(1000 * r + i);
    outputs.emplace_back(counts.output, -1);
  }
  if (calls[0].empty()) return 0;
  std::vector<Bytes> expected(n);
  if (block_count > 0) {
    std::vector<char*> operands;
    for (std::vector<int32_t>& input : inputs) operands.push_back(reinterpret_cast<char*>(input.data()));
    expected =
        OnCpu("direct", RequestOf(spec, block_count), {spec.input_contiguous_count, spec.output_contiguous_count},
              {DType::kS32, ReduceOp::kSum}, operands);
  }

  NodeGroup group(n, max_channels, kDeadlineNs, calls[0].arena.bytes, kLlUnits);
  std::vector<RankArgs> args;
  std::vector<LlArgs> ll;
  for (int32_t r = 0; r < n; ++r) {
    const device::Comm comm = group.CommOf(r);
    if (calls[r].ll) {
      CHECK(calls[r].arena.bytes == 0);
      ll.push_back(WithBuffers(*calls[r].ll, inputs[r].data(), outputs[r].data()));
      ll[r].comm = comm;
      continue;
    }
    const ProgramImage image(calls[r].program);
    char* const there = group.memory.Upload(image.bytes);
    args.push_back(WithBuffers(calls[r], MakeArgs(calls[r], comm, there, image), inputs[r].data(), outputs[r].data()));
    const auto as_bytes = [](std::vector<int32_t>& data) { return reinterpret_cast<char*>(data.data()); };
    if (!moved && calls[r].program.shares_input) args[r].copy_in = {args[r].input.At(r), as_bytes(inputs[r])};
    if (!moved && calls[r].program.shares_output) args[r].copy_out = {as_bytes(outputs[r]), args[r].output.At(r)};
  }
  std::vector<int64_t> input_at, output_at;
  for (int32_t r = 0; r < n; ++r) {
    const char* const pad = group.ranks.intra_node().pads + r * group.ranks.intra_node().pad_bytes;
    input_at.push_back(reinterpret_cast<char*>(inputs[r].data()) - pad);
    output_at.push_back(reinterpret_cast<char*>(outputs[r].data()) - pad);
  }
  for (RankArgs& own : args) {
    if (moved && calls[0].program.shares_input) own.input = own.comm.signals.pad, own.input_at = input_at.data();
    if (moved && calls[0].program.shares_output) own.output = own.comm.signals.pad, own.output_at = output_at.data();
  }
  emulation::Launch(static_cast<unsigned>(calls[0].num_channels), static_cast<unsigned>(n), 4, 7, [&] {
    if (!ll.empty()) {
      LlCall call(ll[blockIdx.y], static_cast<int32_t>(blockIdx.x));
      return call.Run();
    }
    NoNetwork network;
    ChannelExecutor<NoNetwork> executor(args[blockIdx.y], network, static_cast<int32_t>(blockIdx.x));
    executor.Run();
  });
  for (int32_t r = 0; r < n; ++r) {
    CHECK(group.report(r).state == device::Report::kNone);
    CHECK(std::memcmp(outputs[r].data(), expected[r].data(), expected[r].size()) == 0);
  }
  return calls[0].arena.bytes;
}

TEST_CASE("calls with buffers in an arena, and elsewhere") {
  int num_calls = 0;
  for (int c = 0; c <= static_cast<int>(Collective::kBarrier); ++c) {
    const auto collective = static_cast<Collective>(c);
    if (OfLists(collective)) continue;  // refused, see below
    for (const Algorithm& algorithm : Algorithms(collective)) {
      for (const int32_t n : {1, 2, 4, 5}) {
        CallSpec spec = SpecOf(collective, n, algorithm.name);
        if (!algorithm.supports(RequestOf(spec, 1))) continue;
        for (const int64_t block_count : {0, 1, 7, 20000}) {  // 20000: several channels, and fragments
          if (block_count == 20000) {
            const bool gathers = collective == Collective::kAllGather,
                       scatters = collective == Collective::kReduceScatter;
            spec.input_contiguous_count = scatters || collective == Collective::kAllToAll ? 50 : 0;
            spec.output_contiguous_count = gathers || collective == Collective::kAllToAll ? 2500 : 0;
          }
          const int64_t arena_bytes = RunCall(spec, collective == Collective::kBarrier ? 0 : block_count, 3);
          CHECK(arena_bytes == 0 || block_count > 0);  // empty calls need none
          if (block_count != 20000) RunCall(spec, collective == Collective::kBarrier ? 0 : block_count, 3, true);
          ++num_calls;
        }
      }
    }
  }
  CHECK(num_calls > 270);
}

// Nothing is copied before or after the plan, and the arena does not grow with the operand.
TEST_CASE("large calls are staged in a ring in the arena") {
  constexpr int64_t kRing = kStagingSlots * kStagingSlotBytes;
  for (const Collective collective : {Collective::kAllToAll, Collective::kAllGather, Collective::kAllReduce,
                                      Collective::kReduceScatter, Collective::kPermute, Collective::kBroadcast}) {
    const CallSpec spec = SpecOf(collective, 2, "direct");
    const int64_t of_ring = kRing / 4 / CountsOf(collective, 2, 1).input;  // elements of a block
    const bool halves = collective != Collective::kAllGather && collective != Collective::kPermute &&
                        collective != Collective::kBroadcast;  // a rank does not stage its own half
    const int64_t bytes = collective == Collective::kAllReduce || !halves ? kRing : kRing / 2;  // sums: the other half
    CHECK(RunCall(spec, of_ring + 1, 1) == bytes);
    CHECK(RunCall(spec, 2 * of_ring + 100, 1) == bytes);
    for (const bool in_place : {false, true}) {
      const Counts counts = CountsOf(collective, 2, 3 * of_ring);
      const CallProgram call =
          Made(MakeCallProgram(spec, DType::kS32, counts.input, counts.output, {1, 2}, 1, in_place));
      CHECK(call.program.shares_input == in_place && (call.program.scratch_count > 0) != in_place);
      CHECK(call.program.shares_output == (in_place && collective == Collective::kAllReduce));
    }
    // Two channels: the operand of each fits into its ring.
    const Counts counts = CountsOf(collective, 2, 2 * of_ring);
    CHECK(Made(MakeCallProgram(spec, DType::kS32, counts.input, counts.output, {1, 2}, 2)).program.shares_input);
  }
}

TEST_CASE("an all_to_all of small fragments copies its operand whole") {
  const auto staged = [](int32_t num_ranks, int64_t contiguous_count) {
    CallSpec spec = SpecOf(Collective::kAllToAll, num_ranks, "direct");
    spec.output_contiguous_count = contiguous_count;
    const Counts counts = CountsOf(spec.collective, num_ranks, 1 << 20);
    return !Made(MakeCallProgram(spec, DType::kS32, counts.input, counts.output, {1, num_ranks}, 1))
                .program.shares_input;
  };
  CHECK(staged(9, 0) && staged(9, 1 << 20) && staged(8, 1 << 10) && !staged(9, 1 << 10));
}

// Only calls that request multimem use it.
TEST_CASE("calls by multimem") {
  const auto make = [](Collective collective, const char* algorithm, DType dtype, int64_t block_count,
                       RankPlacement placement, int64_t max_sms = 0) {
    const Counts counts = CountsOf(collective, 4, block_count);
    CallSpec spec = SpecOf(collective, 4, algorithm);
    spec.max_sms = max_sms;
    return MakeCallProgram(spec, dtype, counts.input, counts.output, placement, 32);
  };
  for (const Collective collective : {Collective::kAllReduce, Collective::kReduceScatter, Collective::kAllGather}) {
    const CallProgram asked = Made(make(collective, "multimem", DType::kBF16, 100'001, {1, 4}));
    CHECK(asked.multimem && !asked.ll && !asked.empty() && asked.arena.bytes == 0);
    CHECK(asked.num_channels > 2 && asked.multimem->num_channels == asked.num_channels);
    // Blocks are rounded up to whole units of 16 bytes.
    const int64_t num_blocks = collective == Collective::kAllReduce ? 1 : 4;
    CHECK(MultimemBytes(*asked.multimem) == num_blocks * 200'016);
    CHECK(Made(make(collective, "multimem", DType::kF16, 100'001, {1, 4}, 2)).num_channels == 2);
    CHECK(!Made(make(collective, "", DType::kF32, 100'001, {1, 4})).multimem);
    CHECK(Made(make(collective, "multimem", DType::kF32, 0, {1, 4})).empty());
    const std::string error = make(collective, "multimem", DType::kF32, 8, {1, 2}).status().message();
    CHECK(Has(error, "algorithm \"multimem\" needs one node of GPUs with NVLink SHARP, got 2 nodes of 2 ranks"));
    CHECK(Has(error, "on GPUs, the ranks that NVLink connects form a node"));
    const StatusOr<CallProgram> integers = make(collective, "multimem", DType::kS32, 8, {1, 4});
    CHECK(integers.ok() == !Reduces(collective));
    CHECK(integers.ok() ||
          Has(integers.status().message(), "algorithm \"multimem\" supports only sums of f32, bf16 and f16"));
  }
}

TEST_CASE("an arena holds what ranks share") {
  // Everybody reads everybody's input; results are written where XLA wants them.
  const CallSpec spec = SpecOf(Collective::kAllGather, 4, "direct");
  const CallProgram call = Made(MakeCallProgram(spec, DType::kF32, 1000, 4000, {1, 4}, 32));
  CHECK(call.program.shares_input && !call.program.shares_output);
  CHECK(call.arena.input == 0 && call.arena.bytes == 4096);
  const device::Window arena = {reinterpret_cast<char*>(1 << 20), 1 << 16};
  device::Comm comm;
  comm.local = {1, 4, 0, 1};
  comm.arena = arena;
  const ProgramImage image(call.program);
  CHECK(image.sources % 256 == 0 && image.channels % 256 == 0);
  char x, y;
  const RankArgs args = WithBuffers(call, MakeArgs(call, comm, image.bytes.data(), image), &x, &y);
  CHECK(args.input.At(3) == arena.At(3));
  CHECK(args.output.At(3) == &y && args.output.At(0) == &y);
  CHECK(args.ranks_per_node == 4);
}

TEST_CASE("windows are equally spaced") {
  char* const base = reinterpret_cast<char*>(int64_t{1} << 40);
  CHECK(MakeWindow({base})->base == base && MakeWindow({base})->stride == 0);
  const int64_t far = int64_t{6} << 32;
  CHECK(MakeWindow({base, base + far, base + 2 * far})->stride == far);
  CHECK(MakeWindow({base, base - far, base - 2 * far})->At(2) == base - 2 * far);
  CHECK(Has(MakeWindow({base, base + far, base + 3 * far}).status().message(), "not equally spaced: rank 2"));
  CHECK(Has(MakeWindow({base, nullptr}).status().message(), "memory of rank 1 is not addressable"));
}

TEST_CASE("failure texts name rank, step and timeout") {
  CHECK(PhaseText(kEntryBarrier) == "in the entry barrier" && PhaseText(kExitBarrier) == "in the exit barrier" &&
        PhaseText(7) == "in step 7");
  CHECK(PhaseText(kLlExchange) == "in the LL exchange");
  CHECK(PhaseText(kOffsetExchange) == "in the exchange of offsets");
  device::Report report;
  report.step = 3;
  report.rank = 2;
  report.peer = 5;
  report.channel = 1;
  report.expected = 4;
  report.seen = 3;
  CHECK(FailureText(report, "psum at model.py:7 (step)", 2.5) ==
        "psum at model.py:7 (step): rank 2 aborted in step 3: rank 5 did not signal within 2.5 s (JAXCOMM_TIMEOUT_S); "
        "channel 1, 3 signals seen of 4");
  report.step = kFlush;
  CHECK(FailureText(report, "psum at model.py:7 (step)", 2.5) ==
        "psum at model.py:7 (step): rank 2 aborted: the network sent 3 of 4 puts of channel 1 within 2.5 s "
        "(JAXCOMM_TIMEOUT_S)");
}

std::string Refusal(const CallSpec& spec, DType dtype, int64_t input_count, int64_t output_count) {
  const RankPlacement placement = {0, static_cast<int32_t>(spec.group_size)};
  return MakeCallProgram(spec, dtype, input_count, output_count, placement, 32).status().message();
}

TEST_CASE("calls that do not fit are refused") {
  CHECK(Has(Refusal(SpecOf(Collective::kAllGather, 4, "nonsense"), DType::kF32, 8, 32),
            "unknown algorithm \"nonsense\""));
  const std::string far = Refusal(SpecOf(Collective::kAllReduce, 4, "hierarchical"), DType::kF32, 8, 8);
  CHECK(Has(far, "needs several nodes of several ranks") &&
        Has(far, "on GPUs, the ranks that NVLink connects form a node"));
  CHECK(Has(Refusal(SpecOf(Collective::kAllToAll, 4, ""), DType::kF32, 10, 10), "do not match a group of 4 ranks"));
  CHECK(Has(Refusal(SpecOf(Collective::kAllToAllV, 4, "pairwise"), DType::kF32, 8, 8), "GPUs have algorithm 'direct'"));
  CHECK(Has(Refusal(SpecOf(Collective::kAllReduce, 4, ""), DType::kF8E8M0FNU, 8, 8),
            "elements of float8_e8m0fnu cannot be reduced"));
  CallSpec maximum = SpecOf(Collective::kAllReduce, 4, "");
  maximum.reduce_op = ReduceOp::kMax;
  CHECK(Has(Refusal(maximum, DType::kC64, 8, 8), "elements of complex64 cannot be reduced"));
}

}  // namespace
}  // namespace cuda
}  // namespace jaxcomm
