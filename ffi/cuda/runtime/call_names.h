// What people call a call by, for reports that know it by device::Comm::call_id.
#pragma once

#include <cstdint>
#include <string>

namespace jaxcomm {
namespace cuda {

// Known as long as this lives, and a while longer: somebody may ask only then why a kernel has aborted.
class CallName {
 public:
  explicit CallName(const std::string& text);
  ~CallName();
  CallName(const CallName&) = delete;
  CallName& operator=(const CallName&) = delete;

  // Of no other call of the process, also later on.
  uint64_t number() const { return number_; }

  // "a call" if it is not known any more.
  static std::string Of(uint64_t number);

 private:
  uint64_t number_ = 0;
};

}  // namespace cuda
}  // namespace jaxcomm
