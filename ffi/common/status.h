// The result of a function that can fail: Status, or StatusOr<T> where it returns a value.
//
// Names and meanings are those of Abseil and XLA. Abseil itself is not used: the plan layer depends on the standard
// library only, and the FFI boundary has its own types (ffi::Error).
#pragma once

#include <cerrno>
#include <cstdint>
#include <cstring>
#include <optional>
#include <string>
#include <utility>

namespace jaxcomm {

enum class StatusCode : uint8_t {
  kOk,
  kInvalidArgument,   // the arguments of this rank or of another one are invalid
  kDeadlineExceeded,  // a peer is late, dead or unreachable
  kUnavailable,       // the operating system or a library cannot provide a resource
};

class [[nodiscard]] Status {
 public:
  Status() = default;  // success
  Status(StatusCode code, std::string message) : code_(code), message_(std::move(message)) {}

  bool ok() const { return code_ == StatusCode::kOk; }
  StatusCode code() const { return code_; }
  const std::string& message() const { return message_; }  // one sentence for the user; empty on success

 private:
  StatusCode code_ = StatusCode::kOk;
  std::string message_;
};

inline Status OkStatus() { return {}; }
inline Status InvalidArgumentError(std::string message) { return {StatusCode::kInvalidArgument, std::move(message)}; }
inline Status DeadlineExceededError(std::string message) { return {StatusCode::kDeadlineExceeded, std::move(message)}; }
inline Status UnavailableError(std::string message) { return {StatusCode::kUnavailable, std::move(message)}; }
// After a system call that failed: `what`, and the system's reason.
inline Status ErrnoToStatus(const std::string& what) { return UnavailableError(what + ": " + std::strerror(errno)); }

// The same error with `prefix` in front of its message. Success stays success.
inline Status WithPrefix(const std::string& prefix, const Status& status) {
  return status.ok() ? status : Status(status.code(), prefix + status.message());
}

// A value, or the error that prevented it.
template <typename T>
class [[nodiscard]] StatusOr {
 public:
  StatusOr(T value) : value_(std::move(value)) {}          // implicit, so that functions can return a T or a Status
  StatusOr(Status status) : status_(std::move(status)) {}  // must not be success

  bool ok() const { return value_.has_value(); }
  const Status& status() const { return status_; }

  // Only if ok().
  T& operator*() & { return *value_; }
  const T& operator*() const& { return *value_; }
  T&& operator*() && { return *std::move(value_); }
  T* operator->() { return &*value_; }
  const T* operator->() const { return &*value_; }

 private:
  Status status_;
  std::optional<T> value_;
};

}  // namespace jaxcomm

// Leaves the calling function with the status of `expression`, unless that is success.
#define JAXCOMM_RETURN_IF_ERROR(expression)                                                           \
  do {                                                                                                \
    if (::jaxcomm::Status jaxcomm_status = (expression); !jaxcomm_status.ok()) return jaxcomm_status; \
  } while (false)
