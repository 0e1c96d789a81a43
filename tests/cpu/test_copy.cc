// Strided copies against element-by-element indexing.
#include <unistd.h>

#include <cstring>
#include <vector>

#include "../../ffi/cpu/copy.h"
#include "../../ffi/transport/node.h"
#include "../check.h"

namespace jaxcomm {
namespace {

// The position in memory of the logical element `offset`, by the definition in copy.h.
int64_t Index(const BlockLayout& layout, int64_t offset) {
  const int64_t block = offset / layout.block_count, element = offset % layout.block_count;
  const int64_t fragment = element / layout.contiguous_count, within = element % layout.contiguous_count;
  return (fragment * layout.num_blocks + block) * layout.contiguous_count + within;
}

void CheckCopies(int64_t item_bytes, bool stream, int32_t pid = 0) {
  const int64_t num_blocks = 3, block_count = pid == 0 ? 24 : 120;
  const int64_t total = num_blocks * block_count;
  std::vector<char> src(total * item_bytes);
  for (size_t i = 0; i < src.size(); ++i) src[i] = static_cast<char>(i * 7 + 1);
  for (int64_t src_run : {1, 2, 6, 12, 24}) {
    for (int64_t dst_run : {1, 3, 4, 8, 24}) {
      const BlockLayout from{num_blocks, block_count, src_run}, to{num_blocks, block_count, dst_run};
      for (int64_t offset = 0; offset < total; offset += 5) {
        for (int64_t dst_offset : {int64_t{0}, int64_t{7}, offset}) {
          const int64_t count = total - std::max(offset, dst_offset);
          std::vector<char> dst(src.size(), 0), expected(src.size(), 0);
          for (int64_t i = 0; i < count; ++i) {
            std::memcpy(&expected[Index(to, dst_offset + i) * item_bytes], &src[Index(from, offset + i) * item_bytes],
                        item_bytes);
          }
          CopyElements({dst.data(), to}, dst_offset, {src.data(), from, pid}, offset, count, item_bytes, stream);
          CHECK(dst == expected);
        }
      }
    }
  }
}

TEST_CASE("zeros in every layout") {
  constexpr int64_t kTotal = 72;
  for (const int64_t contiguous_count : {1, 3, 8, 24}) {
    const BlockLayout layout{3, 24, contiguous_count};
    for (int64_t offset = 0; offset < kTotal; offset += 5) {
      for (const int64_t count : {int64_t{0}, int64_t{1}, (kTotal - offset) / 2, kTotal - offset}) {
        std::vector<int32_t> data(kTotal, -1), expected(kTotal, -1);
        for (int64_t i = 0; i < count; ++i) expected[Index(layout, offset + i)] = 0;
        ZeroElements({reinterpret_cast<char*>(data.data()), layout}, offset, count, sizeof(int32_t));
        CHECK(data == expected);
      }
    }
  }
}

TEST_CASE("copies of elements of every size, streamed, and from a process with more ranges than a system call takes") {
  for (const int64_t item_bytes : {1, 2, 4, 8, 16}) CheckCopies(item_bytes, false);
  CheckCopies(4, true);
  if (Node::AllowSingleCopy()) CheckCopies(4, false, getpid());
}

TEST_CASE("streamed copies at every alignment") {
  for (int64_t bytes : {4095, 4096, 4097, 100000, 1 << 20}) {
    for (int64_t shift : {0, 1, 13, 63}) {
      std::vector<char> src(bytes + 64), dst(bytes + 128, 0), expected(bytes + 128, 0);
      for (size_t i = 0; i < src.size(); ++i) src[i] = static_cast<char>(i * 31 + i / 256);
      std::memcpy(expected.data() + shift, src.data() + 5, bytes);
      CopyBytes(dst.data() + shift, src.data() + 5, bytes, true);
      CHECK(dst == expected);
    }
  }
}

}  // namespace
}  // namespace jaxcomm
