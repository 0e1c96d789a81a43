// ZeroBytes on memory of all kinds: the range is zero, all else keeps its bytes, and pages of large ranges are given
// back where the kernel would provide zeros for them.
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <utility>
#include <vector>

#include "../../ffi/cpu/pages.h"
#include "../check.h"

namespace jaxcomm {
namespace {

// The limits of the implementation, stated here once more.
constexpr int64_t kMinDiscarded = 4 << 20, kReused = 32 << 20, kLarge = kReused + 1;
constexpr int64_t kSize = 3 * kMinDiscarded, kPage = 4096;

class Mapping {
 public:
  explicit Mapping(int flags, int fd = -1)
      : data_(static_cast<char*>(mmap(nullptr, kSize, PROT_READ | PROT_WRITE, flags, fd, 0))) {
    CHECK(data_ != MAP_FAILED);
  }
  ~Mapping() { munmap(data_, kSize); }
  char* data() const { return data_; }
  int64_t ResidentPages(int64_t begin, int64_t end) const {
    std::vector<unsigned char> resident(static_cast<size_t>((end - begin) / kPage));
    CHECK(mincore(data_ + begin, static_cast<size_t>(end - begin), resident.data()) == 0);
    int64_t pages = 0;
    for (const unsigned char page : resident) pages += page & 1;
    return pages;
  }

 private:
  char* const data_;
};

// Zeroes bytes [begin, end) of a mapping full of 7s.
void CheckZeros(const Mapping& mapping, int64_t begin, int64_t end, int64_t buffer_bytes, bool stream) {
  std::memset(mapping.data(), 7, kSize);
  ZeroBytes(mapping.data() + begin, end - begin, buffer_bytes, stream);
  bool right = true;
  for (int64_t i = 0; i < kSize; ++i) right = right && mapping.data()[i] == (i >= begin && i < end ? 0 : 7);
  CHECK(right);
}

int FileOf(char value) {
  const int fd = memfd_create("pages", 0);
  CHECK(fd >= 0 && ftruncate(fd, kSize) == 0);
  Mapping whole(MAP_SHARED, fd);
  std::memset(whole.data(), value, kSize);
  return fd;
}

TEST_CASE("zeros in private, shared and mapped memory") {
  const int fd = FileOf(5);
  const Mapping anonymous(MAP_PRIVATE | MAP_ANONYMOUS), shared(MAP_SHARED | MAP_ANONYMOUS);
  const Mapping of_file(MAP_PRIVATE, fd), file(MAP_SHARED, fd);
  for (const Mapping* mapping : {&anonymous, &shared, &of_file, &file}) {
    for (const auto& [begin, end] : {std::pair<int64_t, int64_t>{0, kSize},
                                     {1, kSize - 1},
                                     {100, 100},
                                     {kPage + 3, kPage + 70},
                                     {5 * kPage + 8, kSize - 12345},
                                     {kMinDiscarded / 2 + 1, 2 * kMinDiscarded}}) {
      CheckZeros(*mapping, begin, end, kLarge, begin % 2 != 0);
      CheckZeros(*mapping, begin, end, kReused, true);
    }
  }
  close(fd);
}

// malloc reuses the memory of buffers of at most 32 MiB.
TEST_CASE("4 MiB between two huge pages need no memory in large buffers, and not a page less") {
  const Mapping mapping(MAP_PRIVATE | MAP_ANONYMOUS);
  const auto address = reinterpret_cast<uintptr_t>(mapping.data());
  const auto begin = static_cast<int64_t>((kMinDiscarded - address % kMinDiscarded) % kMinDiscarded);
  for (const auto& [less, buffer_bytes] : {std::pair(kPage, kLarge), {0, kLarge}, {0, kReused}}) {
    std::memset(mapping.data(), 7, kSize);
    ZeroBytes(mapping.data() + begin, kMinDiscarded - less, buffer_bytes, less == 0);
    const bool discarded = less == 0 && buffer_bytes == kLarge;
    CHECK(mapping.ResidentPages(begin, begin + kMinDiscarded) == (discarded ? 0 : kMinDiscarded / kPage));
  }
}

}  // namespace
}  // namespace jaxcomm
