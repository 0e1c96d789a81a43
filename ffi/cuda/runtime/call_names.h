// Readable names of calls, for reports of kernels, which identify a call by device::Comm::call_id.
#pragma once

#include <cstdint>
#include <string>

namespace jaxcomm::cuda {

// The name can be looked up while this object lives, and for a while after that: the reason of an abort may be read
// only then.
class CallName {
 public:
  explicit CallName(const std::string& text);
  ~CallName();
  CallName(const CallName&) = delete;
  CallName& operator=(const CallName&) = delete;

  // Unique in the process. Never used again.
  uint64_t number() const { return number_; }

  // "a call" after the name has been dropped.
  static std::string Of(uint64_t number);

 private:
  uint64_t number_ = 0;
};

}  // namespace jaxcomm::cuda
