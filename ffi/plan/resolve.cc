#include "plan/resolve.h"

#include <algorithm>
#include <utility>

#include "plan/select.h"

namespace jaxcomm {
namespace {

constexpr char kXla[] = "xla";
constexpr char kPlans[] = "plans";
constexpr char kComposed[] = "xla_hierarchical";
constexpr char kDirect[] = "direct";
constexpr char kHierarchical[] = "hierarchical";
constexpr char kFewerSms[] = "calls with less max_sms than JAXCOMM_MAX_SMS are not measured";
constexpr char kPassXla[] = "; pass algorithm=\"xla\"";

Resolution ByXla(std::string reason) {
  Resolution resolution;
  resolution.algorithm = kXla;
  resolution.reason = std::move(reason);
  return resolution;
}

Resolution ByComposition(std::string reason) {
  Resolution resolution = ByXla(std::move(reason));
  resolution.backend = Backend::kComposition;
  resolution.algorithm = kComposed;
  return resolution;
}

// Whether a call gets fewer thread blocks than the settings allow: the self-test measures with all of them.
bool Limited(int64_t max_sms, const Capabilities& capabilities) {
  return max_sms > 0 && max_sms < capabilities.max_channels;
}

// What the record says of a call on GPUs that names no algorithm; null if it does not know a faster plan.
const Measured* FindMeasured(const CallSpec& spec, const Shapes& shapes, const Placement& placement,
                             const Capabilities& capabilities) {
  const bool of_tokens = TraitsOf(spec.collective).elements == ElementKind::kTokens;
  const Collective collective = of_tokens ? Collective::kDispatch : spec.collective;  // the row of a whole layer
  const int64_t count = of_tokens ? shapes.choices * spec.row_count : shapes.input_count;
  const int64_t bytes = count * ItemBytes(shapes.dtype);
  const int64_t per_node = std::min(placement.ranks_per_node, spec.group_size);
  const std::vector<Measured>& rows = capabilities.measured;
  const auto found = std::find_if(rows.begin(), rows.end(), [&](const Measured& row) {
    return row.collective == collective && (row.dtype == shapes.dtype || !Reduces(collective)) &&
           row.num_ranks == spec.group_size && row.ranks_per_node == per_node && row.min_bytes <= bytes &&
           bytes <= row.max_bytes && (!row.algorithm.empty() || OfLists(collective));
  });
  return found == rows.end() ? nullptr : &*found;
}

// Resolution::lost. XLA's passes for GPUs combine these collectives with others of their kind (all-reduce, all-gather,
// reduce-scatter, collective-permute), and run all asynchronously. Source: openxla/xla,
// xla/service/gpu/gpu_compiler.cc.
std::string LostOf(const CallSpec& spec) {
  const CollectiveTraits& traits = TraitsOf(spec.collective);
  if (traits.input == BufferBlocks::kNone) return "";
  const bool gathers = traits.input == BufferBlocks::kOne && traits.output == BufferBlocks::kPerRank;
  const bool combined = !traits.OfLists() && (gathers || traits.Reduces() || traits.TakesPermutation());
  std::string lost = spec.asynchronous == 0 ? "overlap with computations" : "";
  if (combined) lost += (lost.empty() ? "" : ", ") + std::string("combination with other calls into one message");
  return lost;
}

bool IsFloat(DType dtype) {
  return dtype == DType::kF16 || dtype == DType::kBF16 || dtype == DType::kF32 || dtype == DType::kF64;
}

// Whether the CPU's combine adds rows as XLA would: floats with or without weights, wider integers without.
bool CpuAdds(const CallSpec& spec, DType dtype) {
  if (IsFloat(dtype)) return true;
  const bool integer = dtype >= DType::kBool && dtype <= DType::kU64;
  return spec.weighted == 0 && (spec.home != 0 || integer) && ItemBytes(dtype) > 1;
}

// Whether the kernel of route_and_dispatch takes these sizes, whatever its number of channels.
bool FitsOneExchange(const OneExchange& sizes) {
  if (std::min({sizes.tokens, sizes.choices, sizes.row_bytes}) < 1) return false;
  if (sizes.num_experts > kMaxOneExchangeExperts || OneExchangeSharedBytes(sizes) > kMaxSharedBytes) return false;
  constexpr int32_t kMaxChannels = 1024;  // of any GPU: more than its multiprocessors
  // A channel has the ids, and of each row a multiple of kGrainBytes: at most twice its share.
  const int64_t lines = CeilDiv(sizes.row_bytes, kGrainBytes);
  const int64_t channels = std::min<int64_t>(lines, NumChannels(sizes.tokens * sizes.row_bytes, kMaxChannels));
  const int64_t ids = CeilDiv(sizes.tokens * sizes.choices, kIdsPerUnit);
  const int64_t units = channels * ids + 2 * sizes.tokens * lines * (kGrainBytes / kLlUnitBytes);
  const int64_t epochs = kMaxChannels * static_cast<int64_t>(sizeof(uint64_t));
  return epochs + 2 * sizes.num_ranks * units * 2 * kLlUnitBytes <= kMaxOneExchangeArenaBytes;
}

// The request of the lists of rows of a group. Their sizes are known at run time only: an even share of all rows.
StatusOr<Resolution> ResolveLists(const CallSpec& spec, const Shapes& shapes, const Geometry& geometry,
                                  const std::string& algorithm, const Capabilities& capabilities) {
  const int64_t even = shapes.input_count * ItemBytes(shapes.dtype) / spec.group_size;
  const int64_t list_bytes = shapes.list_bytes < 0 ? even : shapes.list_bytes;
  StatusOr<Request> request = MakeRequest(spec, geometry, shapes.input_count, shapes.output_count);
  JAXCOMM_RETURN_IF_ERROR(request.status());
  if (capabilities.platform != Platform::kCuda) return ResolvePlan(*request, algorithm, list_bytes, capabilities);
  request->block_count = list_bytes;  // the kernels cut the rows over the channels
  StatusOr<Resolution> resolution = ResolvePlan(*request, algorithm, 1, capabilities);
  if (resolution.ok()) resolution->backend = Backend::kRows;
  return resolution;
}

StatusOr<Resolution> ResolveSlicesOnGpus(const CallSpec& spec, const Shapes& shapes, const Placement& placement,
                                         const Capabilities& capabilities) {
  const bool named = !spec.algorithm.empty();
  if (named && spec.algorithm != kDirect) {
    return UnavailableError("GPUs have algorithm 'direct' for groups inside a node, and otherwise 'xla'; got '" +
                            spec.algorithm + "'" + kPassXla);
  }
  if (placement.ranks_per_node < spec.group_size) {
    if (!named && !placement.found) return ByXla("between nodes, slices travel by XLA's own ragged_all_to_all");
    return UnavailableError("algorithm \"direct\" runs inside a node of GPUs, which NVLink connects" +
                            std::string(kPassXla));
  }
  const Geometry geometry = GpuGeometry(spec.group_size, spec.group_size, false);
  StatusOr<Resolution> resolution = ResolveLists(spec, shapes, geometry, kDirect, capabilities);
  if (resolution.ok() && !named) resolution->reason = "one kernel moves the slices inside a node";
  return resolution;
}

StatusOr<Resolution> ResolveRowsOnGpus(const CallSpec& spec, const Shapes& shapes, const Placement& placement,
                                       const Capabilities& capabilities) {
  const bool one_node = placement.ranks_per_node >= spec.group_size;
  const bool named = spec.algorithm == kHierarchical;
  const std::string choices = std::to_string(shapes.choices) + " choices of a rank, " + std::to_string(spec.choices) +
                              " per token, and " + std::to_string(spec.num_experts) + " experts";
  // By default, the kernels must take the call and its gradient, which moves a row per choice. A program that names
  // them, or that runs already, needs those of the call: combine has no marks.
  int64_t marked = shapes.choices;
  if (named || placement.found) {
    const bool sends_tokens = !TraitsOf(spec.collective).SumsTokens() && spec.row_count > 0;
    marked = sends_tokens ? shapes.input_count / spec.row_count : 0;
  }
  if (!FitsRowKernels(marked, spec.choices, spec.num_experts, !one_node)) {
    const std::string why =
        choices + " exceed the shared memory of jaxcomm's kernels" + (one_node ? "" : " between nodes");
    if (named || placement.found) return InvalidArgumentError(why + kPassXla);
    return ByXla(why);
  }
  if (!one_node && !placement.found) {
    if (spec.algorithm == kDirect) return ByXla("algorithm \"direct\" runs inside a node");
    if (!named && capabilities.setting == kPlans && !capabilities.tested_between_nodes) {
      return ByXla("the self-test has not passed between nodes of these GPUs");
    }
  }
  if (!one_node && placement.found && !(named && placement.gin)) {
    return InvalidArgumentError(named ? "between nodes, the call needs GIN, which NCCL does not have here"
                                      : "algorithm \"direct\" runs inside a node of GPUs, which NVLink connects; "
                                        "pass algorithm=\"xla\", and on_overflow=\"drop\" to moe.route");
  }
  const Geometry geometry = GpuGeometry(spec.group_size, placement.ranks_per_node, false);
  StatusOr<Resolution> resolution =
      ResolveLists(spec, shapes, geometry, one_node ? kDirect : kHierarchical, capabilities);
  JAXCOMM_RETURN_IF_ERROR(resolution.status());
  if (one_node) {
    resolution->reason =
        named ? "inside a node, \"hierarchical\" is \"direct\"" : "one kernel moves the rows inside a node";
  } else {
    resolution->reason = named ? "asked for" : "the self-test has passed between nodes";
  }
  // The kernel inside a node adds the rows of a token at once, and not by the nodes that the program declares.
  const bool by_node = one_node && spec.home == 0 && spec.ranks_per_node < spec.group_size;
  resolution->returns_choices =
      TraitsOf(spec.collective).SumsTokens() && spec.per_choice == 0 && (!IsFloat(shapes.dtype) || by_node);
  return resolution;
}

// Whether some division of the group into nodes supports the algorithm: NVLink may connect several hosts.
Status CheckSomeNodes(const CallSpec& spec, const Shapes& shapes, const Capabilities& capabilities) {
  Status status;
  for (int64_t size = spec.group_size; size > 0; --size) {
    if (spec.group_size % size != 0) continue;
    StatusOr<Request> request = MakeRequest(spec, GpuGeometry(spec.group_size, size, capabilities.multimem),
                                            shapes.input_count, shapes.output_count);
    JAXCOMM_RETURN_IF_ERROR(request.status());
    const Algorithm* wanted = FindAlgorithm(spec.collective, spec.algorithm.c_str());
    if (wanted != nullptr && wanted->supports(*request)) return OkStatus();
    if (status.ok()) status = ResolvePlan(*request, spec.algorithm, 1, capabilities).status();
  }
  return status;
}

StatusOr<Resolution> ResolvePlanOnGpus(const CallSpec& spec, const Shapes& shapes, const Placement& placement,
                                       const Capabilities& capabilities) {
  const bool one_node = placement.ranks_per_node >= spec.group_size;
  const bool proven = capabilities.tested_between_nodes || capabilities.setting == kPlans;
  if (!one_node && !placement.found && !proven && spec.algorithm == kHierarchical &&
      TraitsOf(spec.collective).composed) {
    return ByComposition("GIN between nodes of these GPUs has not been tested");
  }
  if (!one_node && placement.found && !placement.gin) {
    return InvalidArgumentError(
        "between nodes, the call needs GIN, which NCCL does not have here; pass "
        "algorithm=\"xla\" or \"xla_hierarchical\"");
  }
  if (!placement.found && !spec.algorithm.empty()) {
    JAXCOMM_RETURN_IF_ERROR(CheckSomeNodes(spec, shapes, capabilities));
  }
  const Geometry geometry = GpuGeometry(spec.group_size, placement.ranks_per_node, capabilities.multimem);
  StatusOr<Request> request = MakeRequest(spec, geometry, shapes.input_count, shapes.output_count);
  JAXCOMM_RETURN_IF_ERROR(request.status());
  const Algorithm* const wanted = FindAlgorithm(spec.collective, spec.algorithm.c_str());
  if (!placement.found && wanted != nullptr && !wanted->supports(*request)) {  // on the nodes that the run may find
    Resolution resolution;
    resolution.backend = Backend::kPlan;
    resolution.algorithm = spec.algorithm;
    resolution.reason = "asked for; needs other nodes than the hosts";
    return resolution;
  }
  return ResolvePlan(*request, spec.algorithm, ItemBytes(shapes.dtype), capabilities);
}

StatusOr<Resolution> ResolveOnCpus(const CallSpec& spec, const Shapes& shapes, const Placement& placement,
                                   const Capabilities& capabilities) {
  const Geometry geometry = CpuGeometry(placement.scope, spec.group_size, placement.ranks_per_node);
  if (OfLists(spec.collective)) {
    const bool combines = TraitsOf(spec.collective).SumsTokens();
    const bool adds = !combines || spec.per_choice != 0 || CpuAdds(spec, shapes.dtype);
    // Rows that are not added in the node go home directly.
    const bool by_choice = combines && (spec.home != 0 || spec.per_choice != 0 || !adds);
    StatusOr<Resolution> resolution =
        ResolveLists(spec, shapes, geometry, by_choice ? kDirect : spec.algorithm, capabilities);
    if (resolution.ok()) resolution->returns_choices = !adds;
    return resolution;
  }
  const StatusOr<Request> request = MakeRequest(spec, geometry, shapes.input_count, shapes.output_count);
  JAXCOMM_RETURN_IF_ERROR(request.status());
  return ResolvePlan(*request, spec.algorithm, ItemBytes(shapes.dtype), capabilities);
}

}  // namespace

Feature FeatureOf(const Resolution& resolution) {
  if (resolution.plan->protocol == Protocol::kMultimem) return Feature::kMultimem;
  if (!resolution.ll) return resolution.request.staged_count > 0 ? Feature::kStaging : Feature::kSteps;
  return resolution.plan->protocol == Protocol::kLlTwoShot ? Feature::kLlTwoShot : Feature::kLl;
}

std::string WhyXla(const std::string& algorithm, const Capabilities& capabilities) {
  if (capabilities.setting == kXla) return "JAXCOMM_ALGORITHM=xla";
  if (algorithm == kXla || algorithm == kComposed) return "asked for";
  if (!algorithm.empty()) return "";
  if (capabilities.platform == Platform::kOther) return "jaxcomm has no collectives for this platform";
  const bool measured = !capabilities.measured.empty() || capabilities.measured_one_exchange;
  if (capabilities.platform == Platform::kCuda && !measured && capabilities.setting != kPlans) {
    return "jaxcomm's collectives are not measured on these GPUs with these versions";
  }
  return "";
}

StatusOr<Resolution> Resolve(const CallSpec& spec, const Shapes& shapes, const Placement& placement,
                             const Capabilities& capabilities) {
  const bool of_lists = OfLists(spec.collective);
  if (std::string why = WhyXla(spec.algorithm, capabilities); !why.empty()) {
    if (of_lists && capabilities.platform == Platform::kCpu) {
      return UnavailableError("XLA has no ragged_all_to_all on CPUs; remove algorithm='xla' and JAXCOMM_ALGORITHM=xla");
    }
    if (spec.algorithm == kComposed && capabilities.setting != kXla) return ByComposition(std::move(why));
    return ByXla(std::move(why));
  }
  if (TraitsOf(spec.collective).OfBoxes() && capabilities.platform != Platform::kCpu) {
    if (!spec.algorithm.empty())
      return UnavailableError("algorithm '" + spec.algorithm + "' runs on CPUs only" + kPassXla);
    return ByXla("jaxcomm has no kernels for it on this platform");
  }
  if (capabilities.platform == Platform::kOther) {
    if (TraitsOf(spec.collective).composed && spec.algorithm == kHierarchical)
      return ByComposition("jaxcomm has no plans for this platform");
    return UnavailableError("algorithm '" + spec.algorithm +
                            "' runs on CPU and CUDA only; remove it, or pass "
                            "algorithm='xla'");
  }
  if (Reduces(spec.collective) && !CanReduce(shapes.dtype, spec.reduce_op)) {
    return InvalidArgumentError(std::string("elements of ") + Name(shapes.dtype) +
                                " cannot be reduced by this operation");
  }
  if (capabilities.platform == Platform::kCpu) return ResolveOnCpus(spec, shapes, placement, capabilities);
  Capabilities limited = capabilities;
  if (Limited(spec.max_sms, capabilities)) limited.max_channels = static_cast<int32_t>(spec.max_sms);
  if (spec.asynchronous != 0) limited.max_channels = std::min(limited.max_channels, kAsynchronousChannels);
  limited.in_place = limited.in_place && spec.asynchronous == 0 && !of_lists;
  const bool by_record = spec.algorithm.empty() && !placement.found && capabilities.setting != kPlans;
  CallSpec named = spec;
  std::string measured;
  if (by_record) {
    if (spec.asynchronous != 0) return ByXla("XLA overlaps its own started collective with computations");
    if (Limited(spec.max_sms, capabilities)) return ByXla(kFewerSms);
    const Measured* const row = FindMeasured(spec, shapes, placement, capabilities);
    if (row == nullptr)
      return ByXla("no measurement on these GPUs has found one plan to be faster at the sizes around this call");
    named.algorithm = row->algorithm;
    measured = "measured as faster than XLA's own collective on these GPUs";
    if (TraitsOf(spec.collective).input != BufferBlocks::kNone && !row->algorithm.empty()) {
      measured +=
          " for operands of " + std::to_string(row->min_bytes) + " to " + std::to_string(row->max_bytes) + " bytes";
    }
  }
  const auto resolve_on_gpus = TraitsOf(spec.collective).elements == ElementKind::kSlices ? ResolveSlicesOnGpus
                               : of_lists                                                 ? ResolveRowsOnGpus
                                                                                          : ResolvePlanOnGpus;
  StatusOr<Resolution> resolution = resolve_on_gpus(named, shapes, placement, limited);
  if (!resolution.ok()) return resolution;
  const bool by_kernels = resolution->backend == Backend::kPlan || resolution->backend == Backend::kRows;
  if (by_record && !by_kernels) return ByXla(std::move(resolution->reason));
  if (by_record && resolution->plan == nullptr) return ByXla("the measured plan needs other nodes than these hosts");
  if (by_kernels) resolution->lost = LostOf(spec);
  if (by_record && resolution->backend == Backend::kPlan) {
    const Feature feature = FeatureOf(*resolution);
    const std::vector<Feature>& passed = capabilities.passed;
    if (std::find(passed.begin(), passed.end(), feature) == passed.end()) {
      return ByXla(std::string("the self-test has not passed \"") + kFeatures[static_cast<int>(feature)] +
                   "\" on these GPUs");
    }
  }
  if (by_record) {
    resolution->reason = named.algorithm.empty() ? measured + "; " + resolution->reason : measured;
  }
  return resolution;
}

StatusOr<Resolution> ResolvePlan(const Request& request, const std::string& algorithm, int64_t item_bytes,
                                 const Capabilities& capabilities) {
  if (capabilities.platform != Platform::kCuda) return Select(request, algorithm, item_bytes, *capabilities.machine);
  Machine gpu = capabilities.machine.value_or(GpuMachine());
  gpu.arena = !capabilities.in_place;
  const int64_t block_bytes = request.block_count * item_bytes;
  const int64_t part_bytes = CeilDiv(block_bytes, request.geometry.num_ranks());
  const int32_t most = capabilities.max_channels;
  if (!FitsLl(block_bytes, most)) gpu.ll.reset();
  if (!FitsLl(part_bytes, most)) gpu.ll_two_shot.reset();
  const bool of_slices = TraitsOf(request.collective).elements == ElementKind::kSlices;
  const int32_t num_channels = (of_slices ? NumSliceChannels : NumChannels)(block_bytes, most);
  Request of_channel = request;
  of_channel.block_count = ChannelCount(request.block_count, item_bytes, num_channels);
  StatusOr<Resolution> resolution = Select(of_channel, algorithm, item_bytes, ChannelMachine(gpu, num_channels));
  JAXCOMM_RETURN_IF_ERROR(resolution.status());
  resolution->call_request = request;
  resolution->machine = std::move(gpu);
  resolution->num_channels = num_channels;
  if (resolution->ll) {
    const bool two_shot = resolution->plan->protocol == Protocol::kLlTwoShot;
    resolution->num_channels = NumLlChannels(two_shot ? part_bytes : block_bytes, most);
  }
  return resolution;
}

RouteAndDispatch ResolveRouteAndDispatch(const OneExchange& sizes, bool named, int64_t max_sms,
                                         const Placement& placement, const Capabilities& capabilities) {
  if (capabilities.platform != Platform::kCuda) return {false, "one exchange runs on GPUs only"};
  if (std::string why = WhyXla(named ? "one_shot" : "", capabilities); !why.empty()) return {false, std::move(why)};
  const bool by_record = !named && capabilities.setting != kPlans;
  if (by_record && !capabilities.measured_one_exchange) {
    return {false, "no measurement on these GPUs has found one exchange to be faster"};
  }
  if (by_record && Limited(max_sms, capabilities)) return {false, kFewerSms};
  // By the cost model, not measured: for 8 choices of 256 experts on 8 GPUs, the flags of kMaxOneExchangeBytes then
  // cost 7 us if dispatch sends a row once per rank. The exchange saves an all_gather and the barriers of dispatch, 9
  // us, and the sort of the ids, which the model does not have.
  if (!named && sizes.tokens * sizes.row_bytes > kMaxOneExchangeBytes) {
    return {false, "a rank has more than " + std::to_string(kMaxOneExchangeBytes) + " bytes of rows"};
  }
  if (!FitsOneExchange(sizes)) return {false, "the sizes exceed the limits of one exchange"};
  if (placement.ranks_per_node < sizes.num_ranks) return {false, "one exchange runs inside a node"};
  return {true, named       ? "asked for"
                : by_record ? "measured as faster than XLA's own collectives on these GPUs"
                            : "few rows"};
}

const char* ResolveCollectiveMatmul(MatmulProduct product, int64_t block_bytes, const Placement& placement,
                                    const Capabilities& capabilities) {
  // On CPUs, transfers and products share the processors, so only a measurement can show a gain. Measured with 2
  // processes of 4 devices on 2 cores (benchmarks/README.md, 2026-11): for the rows of a gather, "ring" takes 0.5 to 1
  // times the time from 128 KiB on, and 0.9 to 1.8 times below. No gain is sure for sums over a gather and for a
  // scatter, inside a process, between hosts and on GPUs.
  constexpr int64_t kMinRingBytes = 128 << 10;
  const bool measured = capabilities.platform == Platform::kCpu && placement.scope == Scope::kNode &&
                        product == MatmulProduct::kRows && WhyXla("", capabilities).empty();
  return measured && block_bytes >= kMinRingBytes ? "ring" : "unfused";
}

Cost CostOf(const Resolution& resolution, std::optional<Machine> machine) {
  const Algorithm& algorithm = *resolution.plan;
  const int64_t item_bytes = resolution.item_bytes;
  if (resolution.num_channels == 0) {
    return machine ? CostOf(algorithm, resolution.request, item_bytes, *machine) : resolution.cost;
  }
  const Machine gpu = machine.value_or(resolution.machine);
  if (resolution.ll) {
    Cost cost = CostOf(algorithm, resolution.call_request, item_bytes, gpu);
    cost.traffic[static_cast<size_t>(Link::kNode)].bytes *= 2;
    return cost;
  }
  Cost cost = resolution.cost;
  if (machine) {
    machine->ll.reset();
    machine->ll_two_shot.reset();
    cost = CostOf(algorithm, resolution.request, item_bytes, ChannelMachine(*machine, resolution.num_channels));
  }
  cost.scratch_bytes *= resolution.num_channels;
  // The slices of channels differ in size. So bytes are counted in the plan of whole blocks.
  Request whole = resolution.call_request;
  whole.chunk_count = std::max<int64_t>(whole.block_count, 1);
  whole.staged_count = resolution.request.staged_count * resolution.num_channels;  // about as many chunks
  Cost of_blocks = CostOf(BuildPlan(algorithm, whole, cost.rank), whole.geometry, item_bytes, GpuMachine());
  if (gpu.arena) {
    of_blocks.traffic[static_cast<size_t>(Link::kSelf)].bytes += CopiedBytes(algorithm, whole, item_bytes);
  }
  for (size_t link = 0; link < kNumLinks; ++link) {
    Traffic& traffic = cost.traffic[link];
    traffic.bytes = of_blocks.traffic[link].bytes;
    traffic.messages *= resolution.num_channels;
    traffic.signals *= resolution.num_channels;
  }
  return cost;
}

}  // namespace jaxcomm
