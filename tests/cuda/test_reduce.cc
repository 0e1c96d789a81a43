// The conversions of the kernels' 8-bit floats. test_executor.cc and test_ll.cc compare sums of all sizes with the
// CPU's.
#include <cstdint>

#include "../../ffi/cuda/kernels/reductions.h"
#include "../check.h"

namespace jaxcomm {
namespace {

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
