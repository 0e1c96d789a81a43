#include "cuda/runtime/device_call.h"

#include <cuda_runtime_api.h>

#include <cstdio>
#include <initializer_list>
#include <mutex>
#include <utility>
#include <vector>

#include "common/hash.h"
#include "cuda/kernels/launch.h"
#include "cuda/nccl/check_cuda.h"
#include "cuda/nccl/device_memory.h"

namespace jaxcomm::cuda {
namespace {

// Owners of arenas. No target of a user has these names.
constexpr const char* kMultimemArena = "jaxcomm: multimem";
constexpr const char* kOneExchangeArena = "jaxcomm: route_and_dispatch";
// Numbers of the buffers in an exchange of places.
constexpr int32_t kInput = 0, kOutput = 1, kNumBuffers = 2;

uint64_t HashOf(std::initializer_list<int64_t> sizes) {
  uint64_t hash = 0;
  for (const int64_t size : sizes) hash = Mix(hash, static_cast<uint64_t>(size));
  return hash;
}

}  // namespace

void WarnOfCopies(const std::string& where, const std::string& why) {
  static std::once_flag warned;
  std::call_once(warned, [&] {
    std::fprintf(stderr, "%s: JAXCOMM_SYMMETRIC_BUFFERS=1, but buffers are copied: %s\n", where.c_str(), why.c_str());
  });
}

StatusOr<std::unique_ptr<DeviceCall>> DeviceCall::Make(const CallSpec& spec, Communicator& communicator, DType dtype,
                                                       int64_t input_count, int64_t output_count,
                                                       bool exchanges_offsets) {
  std::unique_ptr<DeviceCall> made(new DeviceCall(communicator, spec));
  const bool of_tokens = TraitsOf(spec.collective).elements == ElementKind::kTokens;
  StatusOr<CallProgram> call = MakeCallProgram(spec, dtype, input_count, output_count, communicator.placement(),
                                               communicator.max_channels(), exchanges_offsets);
  // Only the ranks of a dispatch or combine have shapes of their own, so that one rank alone may be refused.
  JAXCOMM_RETURN_IF_ERROR(of_tokens ? communicator.AllDone("when it compared its shapes with the limits", call.status())
                                    : call.status());
  made->call_ = *std::move(call);
  // Thread block c of a rank waits for thread block c of its peers.
  const auto num_channels = static_cast<uint64_t>(made->call_.num_channels);
  JAXCOMM_RETURN_IF_ERROR(communicator.CheckSameOnAllRanks("the number of thread blocks (max_sms)", num_channels));
  CallProgram& program = made->call_;
  RowArgs* const rows = program.inter_node_rows ? &program.inter_node_rows->rows
                        : program.rows          ? &*program.rows
                                                : nullptr;
  if (of_tokens) {
    // A rank knows only from its own shapes where the rows of the others lie. A rank without rows or slots of its own
    // has no kernel to launch, but the others would wait for it.
    const RowArgs own = rows != nullptr ? *rows : RowArgs();
    const uint64_t shapes = HashOf({own.num_rows, own.num_slots, own.num_choices, own.row_bytes});
    JAXCOMM_RETURN_IF_ERROR(communicator.CheckSameOnAllRanks("the hash of the shapes of the rows", shapes));
  }
  made->args_.comm = communicator.comm();
  device::Comm& comm = made->args_.comm;
  if (made->call_.arena.bytes > 0) {
    JAXCOMM_RETURN_IF_ERROR(communicator.Reserve(made->call_.arena.bytes, &comm.arena, &comm.arena_bytes));
  }
  if (made->call_.multimem) {
    // Not the arena of plans, which has no multicast address.
    JAXCOMM_RETURN_IF_ERROR(communicator.ReserveFor(kMultimemArena, MultimemBytes(*made->call_.multimem), &comm));
    if (comm.arena_multicast.base == nullptr) {
      return UnavailableError(
          "algorithm \"multimem\" needs NVLink SHARP, which the group's GPUs, their switch or NCCL don't offer (see "
          "python -m jaxcomm.info --communicator)");
    }
  }
  comm.call_id = made->name_.number();
  communicator.AddToRecorder(comm.call_id, spec, dtype, input_count, output_count);
  if (rows != nullptr) {
    JAXCOMM_RETURN_IF_ERROR(communicator.AllDone("when it allocated the state of a call", made->AllocateState(rows)));
    rows->comm = comm;
    if (!program.inter_node_rows) return made;
    program.inter_node_rows->node = comm;
    program.inter_node_rows->gin = communicator.gin()->Handle(comm, communicator.Registered(comm.arena));
    rows->comm = program.inter_node_rows->gin.comm;
    return made;
  }
  if (program.slices && communicator.bulk_copies()) program.slices->bulk = kSliceStages;
  if (program.slices || program.ll || program.multimem) {
    (program.slices ? program.slices->comm : program.ll ? program.ll->comm : program.multimem->comm) = comm;
    return made;
  }
  made->where_ = spec.Where();
  if (exchanges_offsets && communicator.placement().ranks_per_node == communicator.size() &&
      (made->shares_input() || made->shares_output()) && !made->call_.program.steps.empty()) {
    made->places_ = std::make_unique<BufferPlaces>(communicator, comm, kNumBuffers);
  }
  // After a failure here, the kernels of the other ranks would wait for this rank.
  JAXCOMM_RETURN_IF_ERROR(communicator.AllDone("when it copied its program to the GPU", made->Upload()));
  if (const Gin* const gin = communicator.gin()) {
    made->gin_args_ = gin->Args(comm, communicator.Registered(comm.arena), made->call_.arena);
  }
  return made;
}

StatusOr<std::unique_ptr<DeviceCall>> DeviceCall::Make(const CallSpec& spec, Communicator& communicator,
                                                       const RouteAndDispatchShape& shape) {
  const RankPlacement placement = communicator.placement();
  if (placement.ranks_per_node != spec.group_size) {
    return InvalidArgumentError(
        "moe.route_and_dispatch runs inside a node on GPUs; the GPUs of this group form " +
        std::to_string(spec.group_size / placement.ranks_per_node) +
        " nodes: pass algorithm=\"xla\" and on_overflow=\"drop\" (the ranks that NVLink connects form a node: see "
        "docs/guide/gpus.md)");
  }
  std::unique_ptr<DeviceCall> made(new DeviceCall(communicator, spec));
  const StatusOr<RouteAndDispatchArgs> args = MakeRouteAndDispatchArgs(spec, shape, communicator.max_channels());
  // Ranks must agree before any of them reserves memory. A rank with an error of its own must not leave the others
  // waiting.
  JAXCOMM_RETURN_IF_ERROR(communicator.AllDone("when it compared its sizes with the limits", args.status()));
  const uint64_t shapes = HashOf(
      {shape.tokens, shape.choices, shape.num_experts, shape.capacity, shape.align, shape.slots, shape.row_bytes});
  JAXCOMM_RETURN_IF_ERROR(communicator.CheckSameOnAllRanks("the hash of the shapes", shapes));
  device::Comm comm = communicator.comm();
  JAXCOMM_RETURN_IF_ERROR(communicator.ReserveFor(kOneExchangeArena, ArenaBytes(*args), &comm));
  comm.call_id = made->name_.number();
  communicator.AddToRecorder(comm.call_id, spec, DType::kU8, shape.tokens * shape.row_bytes,
                             shape.capacity * shape.row_bytes);
  made->one_exchange_ = WithComm(*args, comm);
  return made;
}

Status DeviceCall::AllocateState(RowArgs* rows) {
  ScopedDevice keep;
  JAXCOMM_RETURN_IF_ERROR(CheckCuda("cudaSetDevice", cudaSetDevice(communicator_.device())));
  const uint64_t none = 0;
  JAXCOMM_ASSIGN_OR_RETURN(image_, CopyToGpu(&none, sizeof none, Communicator::Configured().timeout_s));
  rows->state = reinterpret_cast<uint64_t*>(image_);
  return OkStatus();
}

Status DeviceCall::Upload() {
  ScopedDevice keep;
  const ProgramImage image(call_.program);
  JAXCOMM_RETURN_IF_ERROR(CheckCuda("cudaSetDevice", cudaSetDevice(communicator_.device())));
  JAXCOMM_ASSIGN_OR_RETURN(image_,
                           CopyToGpu(image.bytes.data(), image.bytes.size(), Communicator::Configured().timeout_s));
  args_ = MakeArgs(call_, args_.comm, image_, image);
  if (communicator_.bulk_copies()) args_.bulk = kPlanStages;
  if (!places_) return OkStatus();
  JAXCOMM_RETURN_IF_ERROR(places_->Allocate());
  // Relative to the begin of the signals, as the places are.
  if (shares_input()) {
    args_.input = args_.comm.signals.pad;
    args_.input_at = places_->At(kInput);
  }
  if (shares_output()) {
    args_.output = args_.comm.signals.pad;
    args_.output_at = places_->At(kOutput);
  }
  return OkStatus();
}

Status DeviceCall::Place(const char* name, const void* address, const XlaWindow& window, int64_t in_arena,
                         Shared* shared, BufferPlace* place) const {
  const StatusOr<int64_t> found = window.window != nullptr ? communicator_.PlaceOf(window.window)
                                                           : StatusOr<int64_t>(UnavailableError("XLA gives no window"));
  if (!found.ok()) WarnOfCopies(where_, std::string("of the ") + name + ": " + found.status().message());
  if (!placed_) {
    JAXCOMM_ASSIGN_OR_RETURN(const bool all_have, communicator_.AllTrue(found.ok()));
    shared->in_place = all_have;
    if (found.ok() && !all_have) WarnOfCopies(where_, std::string("of the ") + name + ": another rank has no window");
  }
  if (!shared->in_place) {
    *place = {in_arena, communicator_.PlaceOf(args_.comm.arena)};
    return OkStatus();
  }
  JAXCOMM_RETURN_IF_ERROR(
      WithPrefix(std::string("the ") + name + " was in a window of XLA's before, but is not now: ", found.status()));
  shared->address = address;
  *place = {window.offset, *found};
  return OkStatus();
}

Status DeviceCall::ExchangeOffsets(const void* x, const void* y, const XlaWindow& input, const XlaWindow& output,
                                   cudaStream_t stream) {
  if (!places_) return OkStatus();
  std::vector<BufferPlace> own(kNumBuffers);
  if (shares_input()) {
    JAXCOMM_RETURN_IF_ERROR(Place("operand", x, input, call_.arena.input, &input_, &own[kInput]));
  }
  if (shares_output()) {
    JAXCOMM_RETURN_IF_ERROR(Place("result", y, output, call_.arena.output, &output_, &own[kOutput]));
  }
  JAXCOMM_RETURN_IF_ERROR(places_->Write(own, stream));
  placed_ = true;
  return OkStatus();
}

DeviceCall::~DeviceCall() {
  communicator_.RemoveFromRecorder(name_.number());
  // XLA destroys the executable's CUDA graphs with it.
  if (image_ != nullptr) Retire(communicator_.device(), image_);
}

Status DeviceCall::CheckAlignment(const void* x, const void* y) const {
  for (const auto& [name, address] : {std::pair{"operand", x}, std::pair{"result", y}}) {
    if (reinterpret_cast<uintptr_t>(address) % static_cast<uintptr_t>(call_.item_bytes) == 0) continue;
    return InvalidArgumentError(std::string("the ") + name + " is not aligned to its elements of " +
                                std::to_string(call_.item_bytes) + " bytes");
  }
  return OkStatus();
}

Status DeviceCall::Launch(const void* x, void* y, cudaStream_t stream, const RowOperands& rows) const {
  JAXCOMM_RETURN_IF_ERROR(CheckAlignment(x, y));
  if (call_.empty()) return OkStatus();
  if (places_ && ((input_.in_place && x != input_.address) || (output_.in_place && y != output_.address))) {
    return UnavailableError("XLA runs the call with other buffers than it has initialized it with");
  }
  return InOrder(stream, [&] { return Enqueue(x, y, stream, rows); });
}

Status DeviceCall::Launch(const RouteAndDispatchBuffers& buffers, cudaStream_t stream) const {
  RouteAndDispatchArgs args = one_exchange_;
  static_cast<RouteAndDispatchBuffers&>(args) = buffers;
  return InOrder(stream, [&] { return CheckCuda("kernel", cuda::Launch(args, stream)); });
}

template <typename F>
Status DeviceCall::InOrder(cudaStream_t stream, F enqueue) const {
  ScopedDevice keep;
  JAXCOMM_RETURN_IF_ERROR(CheckCuda("cudaSetDevice", cudaSetDevice(communicator_.device())));
  JAXCOMM_RETURN_IF_ERROR(communicator_.Begin(stream));
  JAXCOMM_RETURN_IF_ERROR(enqueue());
  return communicator_.End(stream);
}

Status DeviceCall::Enqueue(const void* x, void* y, cudaStream_t stream, const RowOperands& rows) const {
  if (call_.rows) {
    JAXCOMM_ASSIGN_OR_RETURN(const RowArgs whole, WithBuffers(*call_.rows, x, y, rows));
    return CheckCuda("kernel", cuda::Launch(whole, stream));
  }
  if (call_.inter_node_rows) {
    JAXCOMM_ASSIGN_OR_RETURN(const InterNodeRowArgs whole, WithBuffers(*call_.inter_node_rows, x, y, rows));
    const Gin& gin = *communicator_.gin();
    return CheckCuda("kernel", gin.version().launch_rows(whole, gin.nccl_comm(), stream));
  }
  if (call_.slices) {
    JAXCOMM_ASSIGN_OR_RETURN(const SliceArgs whole, WithBuffers(*call_.slices, x, y, rows));
    return CheckCuda("kernel", cuda::Launch(whole, stream));
  }
  if (call_.ll) return CheckCuda("kernel", cuda::Launch(WithBuffers(*call_.ll, x, y), stream));
  if (call_.multimem) return CheckCuda("kernel", cuda::Launch(WithBuffers(*call_.multimem, x, y), stream));
  if (places_) JAXCOMM_RETURN_IF_ERROR(places_->Exchange(stream));
  RankArgs args = WithBuffers(call_, args_, x, y);
  const auto in_arena = [&](int64_t offset) { return args.comm.arena.At(args.comm.local.rank, offset); };
  if (shares_input() && !input_.in_place) args.copy_in = {in_arena(call_.arena.input), static_cast<const char*>(x)};
  if (shares_output() && !output_.in_place) args.copy_out = {static_cast<char*>(y), in_arena(call_.arena.output)};
  if (const Gin* const gin = communicator_.gin()) {
    return CheckCuda("kernel", gin->version().launch(args, gin_args_, gin->nccl_comm(), call_.num_channels, stream));
  }
  return CheckCuda("kernel", cuda::Launch(args, call_.num_channels, stream));
}

}  // namespace jaxcomm::cuda
