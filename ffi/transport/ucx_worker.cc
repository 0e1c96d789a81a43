#include "transport/ucx_worker.h"

#include <cstdlib>
#include <cstring>
#include <sstream>
#include <utility>
#include <vector>

namespace jaxcomm {
namespace {

constexpr char kAddressMagic[8] = "jaxcUCX";

// Segment size of UCX over TCP: an eager message with its headers, which take less than 4 KiB. With UCX's default of 8
// KiB, large messages reach 1.2 GB/s over loopback, with 128 KiB 5.2 GB/s (16 MiB messages, UCX 1.22, two cores of an
// AMD EPYC guest, 2026-11). In turns with gloo, a ppermute of 16 MiB takes 1.0 to 1.1 of gloo's time with 128 KiB, and
// 0.7 to 0.9 with 512 KiB (2 cores of an Intel Xeon, 2026-11). UCX_TCP_TX_SEG_SIZE or UCX_TCP_RX_SEG_SIZE in the user's
// environment replaces both: segments that are longer at the sender than at the receiver do not arrive.
constexpr size_t kTcpSegmentBytes = kEagerBytes + (4 << 10);
constexpr unsigned kMinorWithTransportPrefix = 17;

// The names of InfiniBand and RoCE devices include a port ("mlx5_0:1"). Those of kernel interfaces do not.
bool UsesTcp(const std::string& devices) {
  std::istringstream names(devices.empty() ? "all" : devices);
  for (std::string name; std::getline(names, name, ',');) {
    if (name.find(':') == std::string::npos) return true;
  }
  return false;
}

struct AddressHead {
  char magic[8] = {};
  int32_t process = -1;
  uint32_t version[2] = {};
  uint32_t worker_address_bytes = 0;
};

}  // namespace

Status UcxWorker::StatusError(const std::string& what, ucp::Status status) const {
  return UnavailableError(what + ": " + ucx_->ucs_status_string(status) + " (" + ucx_->path + ", UCX " +
                          ucx_->version() + ")");
}

UcxWorker::~UcxWorker() {
  if (worker_) ucx_->ucp_worker_destroy(worker_);
  if (context_) ucx_->ucp_cleanup(context_);
}

Status UcxWorker::Open(const UcxOptions& options, ucp::AmRecvCallback on_message, void* arg) {
  const StatusOr<const UcxLibrary*> library = UcxLibrary::Open(options.library, options.fallback_library);
  if (!library.ok()) return library.status();
  ucx_ = *library;
  ucp::Config config = nullptr;
  ucp::Status status = ucx_->ucp_config_read(nullptr, nullptr, &config);
  if (status != ucp::kOk) return StatusError("ucp_config_read", status);
  std::vector<std::pair<std::string, std::string>> settings = {{"TLS", options.transports},
                                                               {"NET_DEVICES", options.devices}};
  // Since UCX 1.17, names of settings include their transport. UCX warns about TCP settings if TCP is not used.
  const std::string tcp = ucx_->minor < kMinorWithTransportPrefix ? "" : "TCP_";
  const bool users = std::getenv("UCX_TCP_TX_SEG_SIZE") != nullptr || std::getenv("UCX_TCP_RX_SEG_SIZE") != nullptr;
  // A peer that has closed its endpoint answers UCX's keepalive through a new one. Over TCP, UCX 1.22 may end the
  // process there: it closes that endpoint between the two events of its socket. The kernel's keepalive finds hosts
  // that are gone.
  if (UsesTcp(options.devices) && !HasRdma() && std::getenv("UCX_KEEPALIVE_INTERVAL") == nullptr) {
    settings.emplace_back("KEEPALIVE_INTERVAL", "inf");
  }
  if (UsesTcp(options.devices) && !users) {
    const std::string bytes = std::to_string(kTcpSegmentBytes);
    for (const char* name : {"TX_SEG_SIZE", "RX_SEG_SIZE"}) settings.emplace_back(tcp + name, bytes);
  }
  for (const auto& [name, value] : settings) {
    if (!value.empty() && status == ucp::kOk) status = ucx_->ucp_config_modify(config, name.c_str(), value.c_str());
  }
  ucp::ContextParams context_params;
  context_params.mask = ucp::ContextParams::kFeatures | ucp::ContextParams::kEstimatedNumEps;
  context_params.features = ucp::ContextParams::kActiveMessages | ucp::ContextParams::kWakeup;
  context_params.estimated_num_eps = static_cast<size_t>(num_processes_);
  if (status == ucp::kOk) {
    status = ucx_->ucp_init_version(ucp::kApiMajor, ucp::kApiMinor, &context_params, config, &context_);
  }
  ucx_->ucp_config_release(config);
  if (status != ucp::kOk) {
    return UnavailableError(StatusError("ucp_init", status).message() + "; transports " + options.transports +
                            ", devices " + (options.devices.empty() ? "all" : options.devices));
  }
  ucp::WorkerParams worker_params;
  worker_params.mask = ucp::WorkerParams::kThreadMode;
  worker_params.thread_mode = ucp::WorkerParams::kSerialized;
  status = ucx_->ucp_worker_create(context_, &worker_params, &worker_);
  if (status != ucp::kOk) return StatusError("ucp_worker_create", status);
  ucp::HandlerParams handler;
  handler.mask =
      ucp::HandlerParams::kId | ucp::HandlerParams::kFlags | ucp::HandlerParams::kCallback | ucp::HandlerParams::kArg;
  handler.id = kMessageId;
  handler.flags = ucp::HandlerParams::kWholeMessage;
  handler.callback = on_message;
  handler.arg = arg;
  status = ucx_->ucp_worker_set_am_recv_handler(worker_, &handler);
  if (status == ucp::kOk) status = ucx_->ucp_worker_get_efd(worker_, &event_fd_);
  ucp::Address* worker_address = nullptr;
  size_t worker_address_bytes = 0;
  if (status == ucp::kOk) status = ucx_->ucp_worker_get_address(worker_, &worker_address, &worker_address_bytes);
  if (status != ucp::kOk) return StatusError("the setup of a UCX worker failed", status);
  AddressHead head;
  std::memcpy(head.magic, kAddressMagic, sizeof(head.magic));
  head.process = process_;
  head.version[0] = ucx_->major;
  head.version[1] = ucx_->minor;
  head.worker_address_bytes = static_cast<uint32_t>(worker_address_bytes);
  address_.assign(reinterpret_cast<const char*>(&head), sizeof(head));
  address_.append(reinterpret_cast<const char*>(worker_address), worker_address_bytes);
  ucx_->ucp_worker_release_address(worker_, worker_address);
  return OkStatus();
}

StatusOr<const ucp::Address*> UcxWorker::AddressOf(int process, const std::string& address) const {
  AddressHead head;
  if (address.size() >= sizeof(head)) std::memcpy(&head, address.data(), sizeof(head));
  if (process < 0 || process >= num_processes_ || process == process_ ||
      std::memcmp(head.magic, kAddressMagic, sizeof(head.magic)) != 0 || head.process != process ||
      address.size() != sizeof(head) + head.worker_address_bytes) {
    return InvalidArgumentError("process " + std::to_string(process) + " has not published a valid UCX address");
  }
  if (head.version[0] != ucx_->major || head.version[1] != ucx_->minor) {
    return InvalidArgumentError("process " + std::to_string(process) + " has UCX " + std::to_string(head.version[0]) +
                                "." + std::to_string(head.version[1]) + ", process " + std::to_string(process_) +
                                " has UCX " + ucx_->version() + " (" + ucx_->path +
                                "): use the same UCX version in all processes");
  }
  return reinterpret_cast<const ucp::Address*>(address.data() + sizeof(head));
}

}  // namespace jaxcomm
