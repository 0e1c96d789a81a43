// CopyRanges of the device API alone, emulated, and the conversions of the kernels' 8-bit floats. test_executor.cc and
// test_ll.cc compare copies and sums of all sizes with the CPU's.
#include <cstdint>
#include <vector>

#include "../../ffi/cuda/kernels/reductions.h"
#include "../../ffi/include/jaxcomm/device.h"
#include "../check.h"

namespace jaxcomm {
namespace {

// Loads from different peers are in flight at once: no warp begins where another one does.
TEST_CASE("warps begin with different ranges") {
  constexpr int32_t kNum = 5;
  std::vector<char> src(kNum * 100), dst(kNum * 100);
  std::vector<int32_t> first(kNum, -1);  // by warp: the range that it copies first
  emulation::Launch(1, 1, kNum * device::kWarpThreads, 1, [&] {
    device::CopyRanges(kNum, 100, [&](int32_t i) {
      int32_t& of_warp = first[threadIdx.x / device::kWarpThreads];
      if (of_warp < 0) of_warp = i;
      return device::CopyRange{dst.data() + i * 100, src.data() + i * 100, 100};
    });
  });
  CHECK((first == std::vector<int32_t>{0, 1, 2, 3, 4}));
}

template <typename Format>
void TestDecoding(DType dtype) {
  const cuda::AnyFloat8 codec(dtype);
  for (int s = 0; s < 256; ++s) {
    const auto storage = static_cast<uint8_t>(s);
    CHECK(BitsOf(codec.Decode(storage)) == BitsOf(Format::Decode(storage)));
  }
}

TEST_CASE("every value of the 8-bit floats") {
  TestDecoding<Float8E5M2>(DType::kF8E5M2);
  TestDecoding<Float8E4M3>(DType::kF8E4M3);
  TestDecoding<Float8E3M4>(DType::kF8E3M4);
  TestDecoding<Float8E4M3FN>(DType::kF8E4M3FN);
  TestDecoding<Float8E4M3B11FNUZ>(DType::kF8E4M3B11FNUZ);
  TestDecoding<Float8E5M2FNUZ>(DType::kF8E5M2FNUZ);
  TestDecoding<Float8E4M3FNUZ>(DType::kF8E4M3FNUZ);
}

}  // namespace
}  // namespace jaxcomm
