#include "cuda/xla/user_windows.h"

#include <mutex>
#include <string>
#include <string_view>
#include <utility>

namespace jaxcomm::cuda {
namespace {

std::string NameOf(const UserCallState& state, size_t buffer) {
  const size_t num_operands = state.operand_windows.size();
  return buffer < num_operands ? "operand " + std::to_string(state.operand_windows[buffer])
                               : "result " + std::to_string(state.result_windows[buffer - num_operands]);
}

// Where this rank addresses the buffers in this run.
StatusOr<std::vector<BufferPlace>> PlacesOf(UserCallState& state, const UserCall& call,
                                            const XlaCollectives& collectives,
                                            const std::vector<XlaCollectives::Buffer>& buffers) {
  if (!state.no_windows.empty()) return UnavailableError(state.no_windows);
  if (!call.HasOneNode()) {
    return UnavailableError(
        "the group's GPUs are of several nodes; peers of other nodes can't address XLA's buffers, and GIN can't use "
        "their windows");
  }
  std::vector<BufferPlace> places(buffers.size());
  for (size_t i = 0; i < buffers.size(); ++i) {
    if (buffers[i].bytes == 0) continue;  // XLA has no memory for it
    const StatusOr<XlaCollectives::Window> window = collectives.GetWindow(state.Groups(), buffers[i].address);
    JAXCOMM_RETURN_IF_ERROR(WithPrefix(NameOf(state, i) + ": ", window.status()));
    const StatusOr<int64_t> at = call.communicator().PlaceOf(static_cast<ncclWindow_t>(window->window));
    JAXCOMM_RETURN_IF_ERROR(WithPrefix(NameOf(state, i) + ": ", at.status()));
    places[i] = {window->offset, *at};
  }
  return places;
}

}  // namespace

ffi::Error DecodeWindows(const ffi::Dictionary& attributes, UserCallState* state) {
  for (const auto& [name, numbers] : {std::pair{"jaxcomm_operand_windows", &state->operand_windows},
                                      std::pair{"jaxcomm_result_windows", &state->result_windows}}) {
    if (const auto found = attributes.get<ffi::Span<const int64_t>>(name))
      numbers->assign(found->begin(), found->end());
  }
  const size_t num_windows = state->operand_windows.size() + state->result_windows.size();
  if (num_windows > static_cast<size_t>(kMostBuffers)) {
    return ffi::Error::InvalidArgument(state->spec.Where() + ": a call can have " + std::to_string(kMostBuffers) +
                                       " windows, got " + std::to_string(num_windows));
  }
  if (const auto reason = attributes.get<std::string_view>("jaxcomm_no_windows")) state->no_windows = *reason;
  return ffi::Error::Success();
}

StatusOr<std::vector<XlaCollectives::Buffer>> BuffersOf(const UserCallState& state, ffi::RemainingArgs args,
                                                        ffi::RemainingRets rets) {
  std::vector<XlaCollectives::Buffer> buffers;
  for (const int64_t i : state.operand_windows) {
    const auto operand = args.get<ffi::AnyBuffer>(static_cast<size_t>(i));
    if (!operand) return InvalidArgumentError("the call has no operand " + std::to_string(i) + " for a window");
    buffers.push_back({operand->untyped_data(), static_cast<int64_t>(operand->size_bytes())});
  }
  for (const int64_t i : state.result_windows) {
    auto result = rets.get<ffi::AnyBuffer>(static_cast<size_t>(i));
    if (!result) return InvalidArgumentError("the call has no result " + std::to_string(i) + " for a window");
    buffers.push_back({(*result)->untyped_data(), static_cast<int64_t>((*result)->size_bytes())});
  }
  return buffers;
}

// XLA registers windows of all ranks together, so all ranks request them, or none. Initialize finds out which there
// are.
Status RequestWindows(UserCallState& state, const XlaCollectives& collectives, ffi::RemainingArgs args,
                      ffi::RemainingRets rets) {
  if (!state.no_windows.empty()) return OkStatus();
  JAXCOMM_ASSIGN_OR_RETURN(const std::vector<XlaCollectives::Buffer> buffers, BuffersOf(state, args, rets));
  const Status requested = collectives.RequestWindows(state.Groups(), buffers);
  std::lock_guard<std::mutex> lock(state.mutex);
  if (!requested.ok()) state.requested = requested;
  return OkStatus();
}

// XLA's windows are of its communicator of this run, so nothing of them is kept.
Status PlaceWindows(UserCallState& state, UserCall& call, bool first, const XlaCollectives& collectives, int32_t device,
                    cudaStream_t stream) {
  if (state.operand_windows.empty() && state.result_windows.empty()) {
    call.no_windows = "jaxcomm.ffi_call lists no operand_windows and no result_windows";
    return OkStatus();
  }
  if (!first && call.places == nullptr) return OkStatus();
  std::vector<XlaCollectives::Buffer> buffers;
  Status requested;
  {
    std::lock_guard<std::mutex> lock(state.mutex);
    buffers = state.buffers[device];
    requested = state.requested;
  }
  const StatusOr<std::vector<BufferPlace>> places = PlacesOf(state, call, collectives, buffers);
  if (first) {
    Status own = places.status();
    if (!own.ok() && !requested.ok()) own = requested;
    auto made = std::make_unique<BufferPlaces>(call.communicator(), call.comm, static_cast<int32_t>(buffers.size()));
    if (own.ok()) own = made->Allocate();
    JAXCOMM_ASSIGN_OR_RETURN(const bool all_have, call.communicator().AllTrue(own.ok()));
    if (!all_have) {
      call.no_windows = own.ok() ? "another rank has none" : own.message();
      return OkStatus();
    }
    call.places = std::move(made);
  }
  JAXCOMM_RETURN_IF_ERROR(WithPrefix("the buffers had windows in earlier runs, but not now: ", places.status()));
  call.buffers = std::move(buffers);
  return call.places->Write(*places, stream);
}

Status CheckWindows(const UserCall& call) {
  if (call.places != nullptr) return OkStatus();
  return InvalidArgumentError(call.state->spec.Where() +
                              ": peers can't address the call's buffers: " + call.no_windows);
}

Status FindWindow(const UserCall& call, const void* buffer, device::BufferWindow* window) {
  JAXCOMM_RETURN_IF_ERROR(CheckWindows(call));
  // An empty buffer may have the address of another one, but not its place.
  const XlaCollectives::Buffer* found = nullptr;
  for (const XlaCollectives::Buffer& listed : call.buffers) {
    if (listed.address == buffer && (found == nullptr || listed.bytes > found->bytes)) found = &listed;
  }
  if (found == nullptr) {
    return InvalidArgumentError(call.state->spec.Where() +
                                ": a window is wanted of a buffer that jaxcomm.ffi_call does not list in "
                                "operand_windows or result_windows, or that XLA has not initialized the call with");
  }
  // Relative to the begin of the signals, as the places are.
  *window = {call.comm.signals.pad, call.places->At(static_cast<int32_t>(found - call.buffers.data()))};
  return OkStatus();
}

}  // namespace jaxcomm::cuda
