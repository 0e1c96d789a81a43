// Advice to the kernel about pages, and zeros where madvise succeeds and does nothing, as in some emulators of Linux.
#include <sys/mman.h>

#include <algorithm>
#include <memory>
#include <vector>

#include "../../ffi/cpu/pages.h"
#include "participants.h"

namespace {
uintptr_t huge_begin = 0, huge_end = 0;  // of the last advice of huge pages
}

extern "C" int madvise(void* data, size_t bytes, int advice) noexcept {  // in place of the one of the C library
  if (advice == MADV_HUGEPAGE) huge_end = (huge_begin = reinterpret_cast<uintptr_t>(data)) + bytes;
  return 0;
}

namespace jaxcomm {
namespace {

TEST_CASE("zeros where the kernel ignores advice") {
  constexpr int64_t kSize = 12 << 20, kBuffer = 64 << 20;
  std::vector<char> bytes(kSize, 7);
  ZeroBytes(bytes.data() + 1, kSize - 2, kBuffer, false);
  CHECK(bytes.front() == 7 && bytes.back() == 7);
  CHECK(std::all_of(bytes.begin() + 1, bytes.end() - 1, [](char value) { return value == 0; }));
}

TEST_CASE("the pages inside an output of at least 4 MiB shall be huge") {
  constexpr uintptr_t kHuge = 2 << 20;
  for (const int64_t count : {(1 << 20) - 1, 3 << 20}) {
    const std::vector<int32_t> input(count);
    std::vector<int32_t> output(count);
    Counter counter;
    ValueOf(Rendezvous::Make(Spec(Collective::kAllReduce, 1, 1, "psum")))
        ->Arrive(MakeParticipant(count, 0, input.data(), output.data(), count),
                 std::make_unique<CountCompletion>(counter));
    const auto begin = reinterpret_cast<uintptr_t>(output.data()), end = begin + output.size() * sizeof(int32_t);
    const bool large = end - begin >= 2 * kHuge;
    CHECK(huge_begin == (large ? (begin + kHuge - 1) / kHuge * kHuge : 0) &&
          huge_end == (large ? end / kHuge * kHuge : 0));
  }
}

}  // namespace
}  // namespace jaxcomm
