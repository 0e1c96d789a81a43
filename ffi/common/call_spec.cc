#include "common/call_spec.h"

#include "common/hash.h"

namespace jaxcomm {
namespace {

// Mixes a field into a hash.
struct FieldHash {
  uint64_t* hash;

  void operator()(const char*, const std::string& text) const { *hash = Mix(*hash, text); }
  template <typename T>
  void operator()(const char*, const std::vector<T>& numbers) const {
    for (const T number : numbers) *hash = Mix(*hash, static_cast<uint64_t>(number));
    *hash = Mix(*hash, numbers.size());
  }
  template <typename T>
  void operator()(const char*, const T& number) const {
    *hash = Mix(*hash, static_cast<uint64_t>(number));
  }
};

}  // namespace

uint64_t HashAttributes(const CallSpec& spec) {
  uint64_t hash = Mix(0, static_cast<uint64_t>(spec.collective));
  VisitCallAttributes(spec, FieldHash{&hash});
  VisitOtherAttributes(spec, FieldHash{&hash});
  return hash;
}

}  // namespace jaxcomm
