// A UCX worker: the library, its settings, and the address that a process publishes.
#pragma once

#include <string>

#include "transport/ucx_library.h"
#include "transport/ucx_network.h"

namespace jaxcomm {

class UcxWorker {
 public:
  static constexpr unsigned kMessageId = 0;  // of the active message

  UcxWorker(int process, int num_processes) : process_(process), num_processes_(num_processes) {}
  ~UcxWorker();
  UcxWorker(const UcxWorker&) = delete;

  // `on_message` receives the active messages, on the thread that progresses the worker.
  Status Open(const UcxOptions& options, ucp::AmRecvCallback on_message, void* arg);

  // After Open.
  const UcxLibrary& library() const { return *ucx_; }
  ucp::Worker handle() const { return worker_; }
  int event_fd() const { return event_fd_; }
  const std::string& address() const { return address_; }
  // UCX's address in the one that `process` has published. Fails if that is not valid or if UCX has another version.
  StatusOr<const ucp::Address*> AddressOf(int process, const std::string& address) const;

  Status StatusError(const std::string& what, ucp::Status status) const;

 private:
  const int process_;
  const int num_processes_;
  const UcxLibrary* ucx_ = nullptr;
  ucp::Context context_ = nullptr;
  ucp::Worker worker_ = nullptr;
  int event_fd_ = -1;  // UCX's
  std::string address_;
};

}  // namespace jaxcomm
