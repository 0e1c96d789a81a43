// ZeroBytes where madvise succeeds and does nothing, as in some emulators of Linux.
#include <algorithm>
#include <vector>

#include "../../ffi/cpu/pages.h"
#include "../check.h"

extern "C" int madvise(void*, size_t, int) noexcept { return 0; }  // in place of the one of the C library

namespace jaxcomm {
namespace {

TEST_CASE("zeros where the kernel ignores advice") {
  constexpr int64_t kSize = 12 << 20, kBuffer = 64 << 20;
  std::vector<char> bytes(kSize, 7);
  ZeroBytes(bytes.data() + 1, kSize - 2, kBuffer, false);
  CHECK(bytes.front() == 7 && bytes.back() == 7);
  CHECK(std::all_of(bytes.begin() + 1, bytes.end() - 1, [](char value) { return value == 0; }));
}

}  // namespace
}  // namespace jaxcomm
