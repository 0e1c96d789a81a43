#include "cuda/xla/xla_collectives.h"

#include <cstring>

namespace jaxcomm {
namespace {

constexpr char kNeeds[] = ": jaxcomm needs jax, jaxlib and JAX's CUDA plugin 0.11.2 or later on GPUs";
// That of XLA's own collectives: a communicator more would cost memory and another order of launches.
constexpr int64_t kCommunicationId = 0;

xla_abi::FindExtension FinderOf(const XLA_FFI_Api* api) {
  xla_abi::FindExtension find = nullptr;
  if (api->struct_size < xla_abi::kFindExtensionOffset + sizeof find) return nullptr;
  std::memcpy(&find, reinterpret_cast<const char*>(api) + xla_abi::kFindExtensionOffset, sizeof find);
  return find;
}

}  // namespace

DeviceGroups::DeviceGroups(const std::vector<int64_t>& ids, int64_t group_size) : group_size_(group_size) {
  const auto size = static_cast<size_t>(group_size);
  for (size_t i = 0; i < ids.size(); i += size) split_.push_back({ids.data() + i, size});
}

XlaCollectives::XlaCollectives(const XLA_FFI_Api* api, XLA_FFI_ExecutionContext* context) : api_(api) {
  const xla_abi::FindExtension find = FinderOf(api);
  if (find == nullptr) {
    missing_ = "XLA's FFI " + std::to_string(api->api_version.major_version) + "." +
               std::to_string(api->api_version.minor_version) + " has no extensions" + kNeeds;
    return;
  }
  xla_abi::FindExtensionArgs args = {sizeof args, nullptr, context, xla_abi::kCollectives, nullptr};
  if (XLA_FFI_Error* error = find(&args)) {
    missing_ = "XLA does not say whether it provides communicators: " + TakeText(error);
    return;
  }
  if (args.extension == nullptr) {
    missing_ = std::string("XLA provides no communicators to FFI handlers") + kNeeds;
    return;
  }
  const xla_abi::Extension& found = *args.extension;
  if (found.major_version != xla_abi::kCollectivesMajor || found.struct_size < sizeof(xla_abi::Collectives)) {
    missing_ = "XLA's collectives extension is of version " + std::to_string(found.major_version) + "." +
               std::to_string(found.minor_version) + ", which this jaxcomm does not know; install another version";
    return;
  }
  extension_ = reinterpret_cast<const xla_abi::Collectives*>(args.extension);
}

std::string XlaCollectives::Request(const DeviceGroups& groups) const {
  if (extension_ == nullptr) return missing_;
  const std::vector<xla_abi::ReplicaGroup>& split = groups.split();
  xla_abi::RequestArgs args = {sizeof args,  nullptr,      xla_abi::kFlattenedIds,
                               split.data(), split.size(), kCommunicationId};
  XLA_FFI_Error* const error = extension_->request_communicator(extension_, &args);
  return error == nullptr ? "" : "XLA has no communicator for the group: " + TakeText(error);
}

std::string XlaCollectives::Get(const DeviceGroups& groups, void** communicator) const {
  if (extension_ == nullptr) return missing_;
  const std::vector<xla_abi::ReplicaGroup>& split = groups.split();
  xla_abi::GetArgs args = {sizeof args,      nullptr, xla_abi::kFlattenedIds, split.data(), split.size(),
                           kCommunicationId, nullptr};
  if (XLA_FFI_Error* error = extension_->get_communicator(extension_, &args)) {
    return "XLA does not provide the group's communicator: " + TakeText(error);
  }
  if (args.communicator == nullptr) return "XLA's communicator is null";
  *communicator = args.communicator;
  return "";
}

const xla_abi::CollectivesWithWindows* XlaCollectives::WithWindows(std::string* problem) const {
  *problem = missing_;
  if (extension_ == nullptr) return nullptr;
  const xla_abi::Extension& base = extension_->base;
  if (base.minor_version < 2 || base.struct_size < sizeof(xla_abi::CollectivesWithWindows)) {
    *problem = "XLA has windows on its buffers from jaxlib 0.12 on";
    return nullptr;
  }
  return reinterpret_cast<const xla_abi::CollectivesWithWindows*>(extension_);
}

std::string XlaCollectives::RequestWindows(const DeviceGroups& groups, const std::vector<Buffer>& buffers) const {
  std::string problem;
  const xla_abi::CollectivesWithWindows* const extension = WithWindows(&problem);
  if (extension == nullptr) return problem;
  const std::vector<xla_abi::ReplicaGroup>& split = groups.split();
  std::vector<xla_abi::Region> regions;
  for (const Buffer& buffer : buffers) regions.push_back({buffer.address, static_cast<size_t>(buffer.bytes), 0});
  xla_abi::RequestWindowArgs args = {sizeof args,  nullptr,          xla_abi::kFlattenedIds, split.data(),
                                     split.size(), kCommunicationId, regions.data(),         regions.size()};
  XLA_FFI_Error* const error = extension->request_window(extension_, &args);
  return error == nullptr ? "" : "XLA makes no windows on its buffers: " + TakeText(error);
}

std::string XlaCollectives::GetWindow(const DeviceGroups& groups, const void* buffer, void** window,
                                      int64_t* offset) const {
  std::string problem;
  const xla_abi::CollectivesWithWindows* const extension = WithWindows(&problem);
  if (extension == nullptr) return problem;
  const std::vector<xla_abi::ReplicaGroup>& split = groups.split();
  xla_abi::GetWindowArgs args = {
      sizeof args, nullptr, xla_abi::kFlattenedIds, split.data(), split.size(), kCommunicationId, buffer, nullptr, 0};
  if (XLA_FFI_Error* error = extension->get_window(extension_, &args)) {
    return "XLA has no window on its buffer: " + TakeText(error);
  }
  if (args.window == nullptr) return "XLA's window is null";
  *window = args.window;
  *offset = static_cast<int64_t>(args.offset);
  return "";
}

std::string XlaCollectives::TakeText(XLA_FFI_Error* error) const {
  const std::string text = ::xla::ffi::internal::GetErrorMessage(api_, error);
  ::xla::ffi::internal::DestroyError(api_, error);
  return text;
}

}  // namespace jaxcomm
