#include "cuda/program/call_program.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <limits>

#include "plan/partition.h"
#include "plan/resolve.h"

namespace jaxcomm::cuda {
namespace {

constexpr int64_t kAlignBytes = 256;

int64_t Aligned(int64_t bytes) { return CeilDiv(bytes, kAlignBytes) * kAlignBytes; }

ArenaLayout LayoutOf(const CallProgram& call) {
  ArenaLayout layout;
  const auto take = [&](int64_t bytes) {
    const int64_t begin = layout.bytes;
    layout.bytes += Aligned(bytes);
    return begin;
  };
  if (call.program.shares_input) layout.input = take(call.input_bytes);
  if (call.program.shares_output) layout.output = take(call.output_bytes);
  layout.scratch = take(call.program.scratch_count * call.item_bytes);
  return layout;
}

bool SumsByMultimem(Operation operation) {
  const DType dtype = operation.dtype;
  return operation.op == ReduceOp::kSum && (dtype == DType::kF32 || dtype == DType::kBF16 || dtype == DType::kF16);
}

template <typename T>
int64_t Append(const std::vector<T>& values, std::vector<char>& bytes) {
  const auto begin = static_cast<int64_t>(Aligned(static_cast<int64_t>(bytes.size())));
  bytes.resize(begin + values.size() * sizeof(T));
  if (!values.empty()) std::memcpy(bytes.data() + begin, values.data(), values.size() * sizeof(T));
  return begin;
}

// The routing of a dispatch or combine is wrong. Empty: another failure.
std::string RoutingText(const device::Report& report) {
  const std::string peer = "rank " + std::to_string(report.peer);
  const std::string count = std::to_string(static_cast<int64_t>(report.expected));
  const std::string most = std::to_string(static_cast<int64_t>(report.seen));
  switch (report.step) {
    case kTooManyRows:
      return peer + " gets more rows for its experts than it has places for: up to row " + count + " of " + most +
             "; pass more capacity or slots, or on_overflow=\"drop\"";
    case kTooManyRowsOfExpert:
      return "an expert of " + peer + " gets " + count + " rows, but has " + most +
             " slots; pass more slots, or on_overflow=\"drop\"";
    case kUnknownExperts:
      return peer + " has " + count + " expert ids that are not below num_experts=" + most;
    case kUnknownRow:
      return "row " + count + " of the routing of " + peer + " does not exist, expected one of " + most;
    default:
      return "";
  }
}

// A slice of an all_to_all_v is wrong. Empty: another failure. The texts are those of plan/slices.cc, as far as the
// report has the numbers.
std::string SliceText(const device::Report& report) {
  const std::string from = "rank " + std::to_string(report.peer), to = "rank " + std::to_string(SmallOf(report.seen));
  const int64_t size = RowsOf(report.expected), seen = RowsOf(report.seen);
  const int32_t number = SmallOf(report.expected);
  const std::string slice = "slice " + std::to_string(number) + " from " + from + " to " + to + ": ";
  const std::string rows = "rows [" + std::to_string(seen) + ", " + std::to_string(seen + size) + ")";
  switch (report.step) {
    case kWrongSliceSizes:
      return slice + "send_sizes is " + std::to_string(size) + " at " + from + " and recv_sizes is " +
             std::to_string(seen) + " at " + to + ", expected equal sizes of at least 0";
    case kOutsideOfOperand:
      return slice + "the operand has no " + rows + " (input_offsets and send_sizes of " + from + ")";
    case kOutsideOfOutput:
      return slice + "the output has no " + rows + " (output_offsets and send_sizes of " + from + ")";
    case kSlicesOverlap:
      return from + " writes rows from " + std::to_string(seen) + " on and rank " + std::to_string(number) +
             " writes rows from " + std::to_string(size) + " on of the output of " + to +
             ": slices must not overlap there";
    default:
      return "";
  }
}

CallProgram EmptyProgram(DType dtype, int64_t input_count, int64_t output_count) {
  CallProgram call;
  call.operation.dtype = dtype;
  call.item_bytes = ItemBytes(dtype);
  call.input_bytes = input_count * call.item_bytes;
  call.output_bytes = output_count * call.item_bytes;
  return call;
}

StatusOr<CallProgram> MakeSliceProgram(const CallSpec& spec, DType dtype, int64_t input_count, int64_t output_count,
                                       int32_t max_channels) {
  JAXCOMM_ASSIGN_OR_RETURN(const SliceArgs made, MakeSliceArgs(spec, dtype, input_count, output_count, max_channels));
  CallProgram call = EmptyProgram(dtype, input_count, output_count);
  call.num_channels = made.num_channels;
  // Without rows, the kernel moves nothing, but still checks the table. Without elements in a row, there is no kernel,
  // and nothing checks the table.
  if (made.row_bytes == 0) return call;
  call.slices = made;
  call.arena.bytes = ArenaBytes(made);
  return call;
}

// Without slots, the kernel moves nothing, but still checks the table: any choice is one too many.
bool HasNoKernel(const RowArgs& rows, int64_t output_count) {
  return rows.row_bytes == 0 || (output_count == 0 && rows.num_choices == 0);
}

// dispatch and combine between nodes.
StatusOr<CallProgram> MakeRailProgram(const CallSpec& spec, DType dtype, int64_t input_count, int64_t output_count,
                                      RankPlacement placement, int32_t max_channels) {
  JAXCOMM_ASSIGN_OR_RETURN(const InterNodeRowArgs made,
                           MakeInterNodeRowArgs(spec, dtype, input_count, output_count, max_channels));
  const RowArgs& rows = made.rows;
  const auto num_nodes = static_cast<int32_t>(spec.group_size / placement.ranks_per_node);
  if (rows.combines && !made.sums_at_source && rows.num_rows * num_nodes > std::numeric_limits<int32_t>::max()) {
    return InvalidArgumentError("more than 2^31 sums of " + std::to_string(num_nodes) + " nodes");
  }
  CallProgram call = EmptyProgram(dtype, input_count, output_count);
  call.num_channels = rows.num_channels;
  if (HasNoKernel(rows, output_count)) return call;
  call.inter_node_rows = made;
  call.arena.bytes = RailArenaBytes(made, num_nodes);
  return call;
}

// dispatch and combine inside a node.
StatusOr<CallProgram> MakeRowProgram(const CallSpec& spec, DType dtype, int64_t input_count, int64_t output_count,
                                     int32_t max_channels) {
  JAXCOMM_ASSIGN_OR_RETURN(const RowArgs made, MakeRowArgs(spec, dtype, input_count, output_count, max_channels));
  CallProgram call = EmptyProgram(dtype, input_count, output_count);
  call.num_channels = made.num_channels;
  if (HasNoKernel(made, output_count)) return call;
  call.rows = made;
  call.arena.bytes = ArenaBytes(made);
  return call;
}

}  // namespace

StatusOr<CallProgram> MakeCallProgram(const CallSpec& spec, DType dtype, int64_t input_count, int64_t output_count,
                                      RankPlacement placement, int32_t max_channels, bool in_place) {
  Capabilities capabilities;
  capabilities.platform = Platform::kCuda;
  capabilities.setting = "plans";  // the lowering has chosen jaxcomm's kernels
  // If NVLink SHARP is not available, the arena has no multicast address, and the call fails later.
  capabilities.multimem = true;
  capabilities.in_place = in_place;
  capabilities.max_channels = max_channels;
  Shapes shapes = {dtype, input_count, output_count};
  if (spec.row_count > 0) {
    const int64_t rows = (TraitsOf(spec.collective).SumsTokens() ? output_count : input_count) / spec.row_count;
    shapes.choices = spec.per_choice != 0 ? rows : rows * spec.choices;
  }
  const StatusOr<Resolution> resolution =
      Resolve(spec, shapes, {Scope::kNetwork, placement.ranks_per_node, true, true}, capabilities);
  if (!resolution.ok()) {
    return InvalidArgumentError(resolution.status().message() +
                                " (on GPUs, the ranks that NVLink connects form a node: see docs/guide/gpus.md)");
  }
  if (TraitsOf(spec.collective).elements == ElementKind::kSlices) {
    return MakeSliceProgram(spec, dtype, input_count, output_count, max_channels);
  }
  if (resolution->backend == Backend::kRows) {
    return resolution->plan->supports.hierarchical
               ? MakeRailProgram(spec, dtype, input_count, output_count, placement, max_channels)
               : MakeRowProgram(spec, dtype, input_count, output_count, max_channels);
  }
  CallProgram call = EmptyProgram(dtype, input_count, output_count);
  call.operation.op = spec.reduce_op;
  const Request& request = resolution->call_request;
  const int64_t block_count = request.block_count;
  const int32_t num_channels = call.num_channels = resolution->num_channels;
  const ContiguousCounts contiguous = {spec.input_contiguous_count, spec.output_contiguous_count};
  const bool multimem = resolution->plan->protocol == Protocol::kMultimem;
  if (multimem && Reduces(spec.collective) && !SumsByMultimem(call.operation)) {
    return InvalidArgumentError("algorithm \"multimem\" supports only sums of f32, bf16 and f16");
  }
  if (multimem && block_count > 0) {
    call.multimem = MakeMultimemArgs(request, contiguous, dtype, num_channels);
    return call;
  }
  if (resolution->ll) {
    const bool twice = resolution->plan->protocol == Protocol::kLlTwoShot;
    call.ll = MakeLlArgs(request, contiguous, call.operation, num_channels, twice);
    return call;
  }
  const Choice choice(*resolution->plan, resolution->request);
  call.program = MakeRankProgram(choice, block_count, contiguous, call.item_bytes, num_channels, placement.rank);
  call.arena = LayoutOf(call);
  return call;
}

LlArgs MakeLlArgs(const Request& request, ContiguousCounts contiguous, Operation operation, int32_t num_channels,
                  bool two_shot) {
  LlArgs args;
  args.num_channels = num_channels;
  args.reduces = Reduces(request.collective);
  args.two_shot = two_shot;
  args.operation = operation;
  int64_t item_bytes = ItemBytes(operation.dtype), parts = 1;
  // A sum of complex numbers is the sum of their parts. Elements that are not reduced may be split in two as well.
  const bool complex = operation.dtype == DType::kC64 || operation.dtype == DType::kC128;
  if (complex || item_bytes > 8) parts = 2;
  if (complex) args.operation.dtype = operation.dtype == DType::kC64 ? DType::kF32 : DType::kF64;
  const auto blocks = [&](int64_t count, int64_t contiguous_count) {
    return LlBlocks{static_cast<int32_t>(count / request.block_count),
                    static_cast<int32_t>((contiguous_count > 0 ? contiguous_count : request.block_count) * parts)};
  };
  args.input = blocks(InputCount(request), contiguous.input);
  args.output = blocks(OutputCount(request), contiguous.output);
  args.block_count = static_cast<int32_t>(request.block_count * parts);
  args.item_bytes = static_cast<int32_t>(item_bytes / parts);
  return args;
}

MultimemArgs MakeMultimemArgs(const Request& request, ContiguousCounts contiguous, DType dtype, int32_t num_channels) {
  MultimemArgs args;
  const Range block = {0, request.block_count};
  args.input = SliceOf(InputCount(request), request.block_count, block, contiguous.input);
  args.output = SliceOf(OutputCount(request), request.block_count, block, contiguous.output);
  args.dtype = dtype;
  args.item_bytes = static_cast<int32_t>(ItemBytes(dtype));
  args.num_channels = num_channels;
  args.reduces = Reduces(request.collective);
  args.to_all = TraitsOf(request.collective).input == BufferBlocks::kOne;
  return args;
}

ProgramImage::ProgramImage(const RankProgram& program) {
  Append(program.steps, bytes);
  sources = Append(program.sources, bytes);
  channels = Append(program.channels, bytes);
}

RankArgs MakeArgs(const CallProgram& call, const device::Comm& comm, const char* image, const ProgramImage& layout) {
  RankArgs args;
  args.comm = comm;
  const auto in_arena = [&](int64_t begin) { return device::Window{comm.arena.base + begin, comm.arena.stride}; };
  args.input = in_arena(call.arena.input);
  args.output = in_arena(call.arena.output);
  args.scratch = in_arena(call.arena.scratch);
  args.steps = reinterpret_cast<const ProgramStep*>(image);
  args.sources = reinterpret_cast<const Place*>(image + layout.sources);
  args.channels = reinterpret_cast<const ChannelProgram*>(image + layout.channels);
  args.operation = call.operation;
  args.item_bytes = static_cast<int32_t>(call.item_bytes);
  args.ranks_per_node = comm.local.size;
  return args;
}

RankArgs WithBuffers(const CallProgram& call, RankArgs args, const void* x, void* y) {
  // Stride 0 maps every rank to the buffer of this rank.
  if (!call.program.shares_input) args.input = {static_cast<char*>(const_cast<void*>(x)), 0};
  if (!call.program.shares_output) args.output = {static_cast<char*>(y), 0};
  return args;
}

StatusOr<device::Window> MakeWindow(const std::vector<char*>& addresses) {
  const auto address = [&](size_t i) { return reinterpret_cast<int64_t>(addresses[i]); };
  device::Window window;
  window.base = addresses[0];
  window.stride = addresses.size() > 1 ? address(1) - address(0) : 0;
  for (size_t i = 0; i < addresses.size(); ++i) {
    if (addresses[i] == nullptr) {
      return UnavailableError("the memory of rank " + std::to_string(i) + " is not addressable from this rank");
    }
    if (address(i) - address(0) != static_cast<int64_t>(i) * window.stride) {
      return UnavailableError("the ranks' memory is not equally spaced: rank " + std::to_string(i) + " is " +
                              std::to_string(address(i) - address(0)) + " bytes from rank 0, rank 1 is " +
                              std::to_string(window.stride));
    }
  }
  return window;
}

std::string PhaseText(int32_t step) {
  if (step == kEntryBarrier) return "in the entry barrier";
  if (step == kExitBarrier) return "in the exit barrier";
  if (step == kLlExchange) return "in the LL exchange";
  if (step == kOffsetExchange) return "in the exchange of offsets";
  return "in step " + std::to_string(step);
}

std::string TimeoutText(double timeout_s) {
  char seconds[32];
  std::snprintf(seconds, sizeof seconds, "%g", timeout_s);
  return std::string(seconds) + " s (JAXCOMM_TIMEOUT_S)";
}

std::string FailureText(const device::Report& report, const std::string& call, double timeout_s) {
  if (const std::string routing = RoutingText(report); !routing.empty()) return call + ": " + routing;
  if (const std::string slice = SliceText(report); !slice.empty()) return call + ": " + slice;
  const std::string aborted = call + ": rank " + std::to_string(report.rank) + " aborted";
  const std::string channel = "channel " + std::to_string(report.channel), limit = TimeoutText(timeout_s);
  const std::string seen = std::to_string(report.seen), expected = std::to_string(report.expected);
  if (report.step == kFlush) {
    return aborted + ": the network sent " + seen + " of " + expected + " puts of " + channel + " within " + limit;
  }
  if (report.step == kBulkCopy) {
    return aborted + ": a bulk copy of " + expected + " bytes in " + channel + " did not end within " + limit;
  }
  return aborted + " " + PhaseText(report.step) + ": rank " + std::to_string(report.peer) + " did not signal within " +
         limit + "; " + channel + ", " + seen + " signals seen of " + expected;
}

}  // namespace jaxcomm::cuda
