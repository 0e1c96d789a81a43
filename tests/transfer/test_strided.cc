#include <cstring>
#include <numeric>
#include <vector>

#include "../check.h"
#include "transfer/strided.h"

namespace jaxcomm {
namespace {

// Every order of memory of a (2, 3, 4) array, with pages in dimension 1: the elements come in logical order.
TEST_CASE("a walk visits the elements of a box in row-major order, whatever the strides") {
  std::vector<int32_t> memory(2 * 7 * 4);
  std::iota(memory.begin(), memory.end(), 0);
  const std::vector<int64_t> pages = {6, 0, 3};
  for (const std::vector<int64_t>& strides : {std::vector<int64_t>{28, 4, 1}, {4, 8, 1}, {1, 2, 14}, {7, 1, 14}}) {
    for (const bool paged : {false, true}) {
      StridedArray array{reinterpret_cast<char*>(memory.data()), 4, {2, 3, 4}, {}, paged ? 1 : -1, pages};
      for (const int64_t stride : strides) array.strides.push_back(4 * stride);
      for (const Box& box :
           {Box{{0, 0, 0}, {2, 3, 4}}, {{0, 1, 1}, {2, 3, 3}}, {{1, 0, 0}, {2, 1, 4}}, {{0, 0, 2}, {2, 3, 2}}}) {
        std::vector<int32_t> want;
        for (int64_t i = box.begin[0]; i < box.end[0]; ++i) {
          for (int64_t j = box.begin[1]; j < box.end[1]; ++j) {
            for (int64_t k = box.begin[2]; k < box.end[2]; ++k) {
              const int64_t row = paged ? pages[static_cast<size_t>(j)] : j;
              want.push_back(memory[static_cast<size_t>(i * strides[0] + row * strides[1] + k * strides[2])]);
            }
          }
        }
        CHECK(ValueOf(BytesOf(array, box)) == static_cast<int64_t>(want.size() * 4));
        for (const int64_t limit : {4, 12, 1000}) {
          std::vector<int32_t> got(want.size());
          Walk walk(array, box);
          int64_t bytes = 0;
          for (char* to = reinterpret_cast<char*>(got.data());; to += bytes) {
            const char* from = walk.Next(limit, &bytes);
            if (bytes == 0) break;
            CHECK(to + bytes <= reinterpret_cast<char*>(got.data() + got.size()));
            std::memcpy(to, from, static_cast<size_t>(bytes));
          }
          CHECK(got == want);
        }
      }
    }
  }
}

}  // namespace
}  // namespace jaxcomm
