#include "cuda/runtime/call_names.h"

#include <deque>
#include <map>
#include <mutex>

namespace jaxcomm::cuda {
namespace {

struct Names {
  std::mutex mutex;
  std::map<uint64_t, std::string> names;
  std::deque<uint64_t> ended;  // calls that have ended and still have a name
  uint64_t next = 0;
};

Names& GetNames() {
  static auto* names = new Names;
  return *names;
}

}  // namespace

CallName::CallName(const std::string& text) {
  std::lock_guard<std::mutex> lock(GetNames().mutex);
  number_ = GetNames().next++;
  GetNames().names.emplace(number_, text);
}

CallName::~CallName() {
  std::lock_guard<std::mutex> lock(GetNames().mutex);
  constexpr size_t kKept = 256;
  GetNames().ended.push_back(number_);
  if (GetNames().ended.size() <= kKept) return;
  GetNames().names.erase(GetNames().ended.front());
  GetNames().ended.pop_front();
}

std::string CallName::Of(uint64_t number) {
  std::lock_guard<std::mutex> lock(GetNames().mutex);
  const auto found = GetNames().names.find(number);
  return found == GetNames().names.end() ? "a call" : found->second;
}

}  // namespace jaxcomm::cuda
