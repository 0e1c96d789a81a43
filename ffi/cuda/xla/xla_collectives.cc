#include "cuda/xla/xla_collectives.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

namespace jaxcomm {
namespace {

constexpr char kNeeds[] = ": jaxcomm needs jax, jaxlib and JAX's CUDA plugin 0.11.2 or later on GPUs";
// The id of XLA's own collectives. Another id would mean another communicator, which costs memory and another order of
// launches.
constexpr int64_t kCommunicationId = 0;

xla_abi::FindExtension FinderOf(const XLA_FFI_Api* api) {
  xla_abi::FindExtension find = nullptr;
  if (api->struct_size < xla_abi::kFindExtensionOffset + sizeof find) return nullptr;
  std::memcpy(&find, reinterpret_cast<const char*>(api) + xla_abi::kFindExtensionOffset, sizeof find);
  return find;
}

xla_abi::GroupArgs ArgsOf(size_t struct_size, const DeviceGroups& groups) {
  const std::vector<xla_abi::ReplicaGroup>& split = groups.split();
  return {struct_size, nullptr, xla_abi::kFlattenedIds, split.data(), split.size(), kCommunicationId};
}

}  // namespace

DeviceGroups::DeviceGroups(const std::vector<int64_t>& ids, int64_t group_size) {
  const auto size = static_cast<size_t>(group_size);
  for (size_t i = 0; i < ids.size(); i += size) split_.push_back({ids.data() + i, size});
}

XlaCollectives::XlaCollectives(const XLA_FFI_Api* api, XLA_FFI_ExecutionContext* context) : api_(api) {
  const xla_abi::FindExtension find = FinderOf(api);
  if (find == nullptr) {
    missing_ = UnavailableError("XLA's FFI " + std::to_string(api->api_version.major_version) + "." +
                                std::to_string(api->api_version.minor_version) + " has no extensions" + kNeeds);
    return;
  }
  xla_abi::FindExtensionArgs args = {sizeof args, nullptr, context, xla_abi::kCollectives, nullptr};
  if (XLA_FFI_Error* error = find(&args)) {
    missing_ = Error("XLA does not say whether it provides communicators: ", error);
    return;
  }
  if (args.extension == nullptr) {
    missing_ = UnavailableError(std::string("XLA provides no communicators to FFI handlers") + kNeeds);
    return;
  }
  const xla_abi::Extension& found = *args.extension;
  if (found.major_version != xla_abi::kCollectivesMajor || found.struct_size < sizeof(xla_abi::Collectives)) {
    missing_ = UnavailableError("XLA's collectives extension is of version " + std::to_string(found.major_version) +
                                "." + std::to_string(found.minor_version) +
                                ", which this jaxcomm does not know; install another version");
    return;
  }
  extension_ = reinterpret_cast<const xla_abi::Collectives*>(args.extension);
}

Status XlaCollectives::Request(const DeviceGroups& groups) const {
  if (extension_ == nullptr) return missing_;
  xla_abi::GroupArgs args = ArgsOf(sizeof args, groups);
  XLA_FFI_Error* const error = extension_->request_communicator(extension_, &args);
  return error == nullptr ? OkStatus() : Error("XLA has no communicator for the group: ", error);
}

StatusOr<void*> XlaCollectives::Get(const DeviceGroups& groups) const {
  if (extension_ == nullptr) return missing_;
  xla_abi::GetArgs args = {ArgsOf(sizeof args, groups), nullptr};
  if (XLA_FFI_Error* error = extension_->get_communicator(extension_, &args)) {
    return Error("XLA does not provide the group's communicator: ", error);
  }
  if (args.communicator == nullptr) return UnavailableError("XLA's communicator is null");
  return args.communicator;
}

StatusOr<const xla_abi::CollectivesWithWindows*> XlaCollectives::WithWindows() const {
  if (extension_ == nullptr) return missing_;
  const xla_abi::Extension& base = extension_->base;
  if (base.minor_version < 2 || base.struct_size < sizeof(xla_abi::CollectivesWithWindows)) {
    return UnavailableError("XLA has windows on its buffers from jaxlib 0.12 on");
  }
  return reinterpret_cast<const xla_abi::CollectivesWithWindows*>(extension_);
}

Status XlaCollectives::RequestWindows(const DeviceGroups& groups, const std::vector<Buffer>& buffers) const {
  std::vector<xla_abi::Region> regions;
  for (const Buffer& buffer : buffers) {
    const auto bytes = static_cast<size_t>(buffer.bytes);
    // Several operands may be one array, and a result may take the place of an operand.
    const auto same = [&](const xla_abi::Region& other) {
      return other.buffer == buffer.address && other.bytes == bytes;
    };
    if (bytes > 0 && std::none_of(regions.begin(), regions.end(), same)) regions.push_back({buffer.address, bytes, 0});
  }
  if (regions.empty()) return OkStatus();
  JAXCOMM_ASSIGN_OR_RETURN(const xla_abi::CollectivesWithWindows* const extension, WithWindows());
  xla_abi::RequestWindowArgs args = {ArgsOf(sizeof args, groups), regions.data(), regions.size()};
  XLA_FFI_Error* const error = extension->request_window(extension_, &args);
  return error == nullptr ? OkStatus() : Error("XLA makes no windows on its buffers: ", error);
}

StatusOr<XlaCollectives::Window> XlaCollectives::GetWindow(const DeviceGroups& groups, const void* buffer) const {
  JAXCOMM_ASSIGN_OR_RETURN(const xla_abi::CollectivesWithWindows* const extension, WithWindows());
  xla_abi::GetWindowArgs args = {ArgsOf(sizeof args, groups), buffer, nullptr, 0};
  if (XLA_FFI_Error* error = extension->get_window(extension_, &args)) {
    return Error("XLA has no window on its buffer: ", error);
  }
  if (args.window == nullptr) return UnavailableError("XLA's window is null");
  return Window{args.window, static_cast<int64_t>(args.offset)};
}

Status XlaCollectives::Error(const char* prefix, XLA_FFI_Error* error) const {
  std::string text = std::string(prefix) + ::xla::ffi::internal::GetErrorMessage(api_, error);
  ::xla::ffi::internal::DestroyError(api_, error);
  return UnavailableError(std::move(text));
}

}  // namespace jaxcomm
