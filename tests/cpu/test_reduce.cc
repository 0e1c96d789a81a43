// Reductions against a slow oracle; every 8- and 16-bit float pattern through decode and encode.
#include <cmath>
#include <cstring>
#include <random>
#include <type_traits>
#include <vector>

#include "../../ffi/cpu/reduce.h"
#include "../../ffi/include/jaxcomm/small_float.h"
#include "../check.h"

namespace jaxcomm {
namespace {

// Nearest representable value by search over all patterns, ties to the even pattern: independent of Encode's
// arithmetic.
template <typename Format>
void CheckEveryPattern() {
  using Storage = typename Format::Storage;
  const int num_patterns = 1 << (8 * sizeof(Storage));
  for (int i = 0; i < num_patterns; ++i) {
    const auto pattern = static_cast<Storage>(i);
    const float value = Format::Decode(pattern);
    const Storage back = Format::Encode(value);
    if (std::isnan(value)) {
      CHECK(std::isnan(Format::Decode(back)));
    } else {
      CHECK(back == pattern);
    }
  }
  // A value halfway between two neighbours rounds to the even one. Slightly above or below, it rounds to the nearer
  // one.
  for (int i = 0; i + 1 < num_patterns / 2; ++i) {
    const float low = Format::Decode(static_cast<Storage>(i));
    const float high = Format::Decode(static_cast<Storage>(i + 1));
    if (!std::isfinite(low) || !std::isfinite(high)) break;
    const float middle = low + (high - low) / 2;
    CHECK(Format::Encode(middle) == static_cast<Storage>(i % 2 ? i + 1 : i));
    CHECK(Format::Encode(std::nextafter(middle, 0.0f)) == static_cast<Storage>(i));
    CHECK(Format::Encode(std::nextafter(middle, INFINITY)) == static_cast<Storage>(i + 1));
  }
}

template <typename T>
T Sum(T a, T b) {
  if constexpr (std::is_floating_point<T>::value) {
    return a + b;
  } else {
    return static_cast<T>(static_cast<uint64_t>(a) + static_cast<uint64_t>(b));
  }
}

template <typename T>
void CheckPlain(DType dtype) {
  std::mt19937 random(1);
  std::uniform_int_distribution<uint64_t> wide;
  for (int64_t count : {0, 1, 7, 2048, 5000}) {
    for (int num_sources : {1, 2, 3, 4, 5, 7, 8, 9, 12, 14}) {
      std::vector<std::vector<T>> sources(num_sources, std::vector<T>(count));
      std::vector<const void*> pointers;
      for (auto& source : sources) {
        // Integers use all bits and wrap around. Floats are numbers with exact sums.
        for (auto& value : source) {
          value = static_cast<T>(std::is_floating_point<T>::value ? static_cast<int>(random() % 33) - 16
                                                                  : static_cast<int64_t>(wide(random)));
        }
        pointers.push_back(source.data());
      }
      std::vector<T> sum(count), largest(count), smallest(count);
      for (int64_t i = 0; i < count; ++i) {
        sum[i] = largest[i] = smallest[i] = sources[0][i];
        for (int s = 1; s < num_sources; ++s) {
          sum[i] = Sum(sum[i], sources[s][i]);
          if (sources[s][i] > largest[i]) largest[i] = sources[s][i];
          if (sources[s][i] < smallest[i]) smallest[i] = sources[s][i];
        }
      }
      std::vector<T> out(count);
      FindReduce(dtype, ReduceOp::kSum)(out.data(), pointers.data(), num_sources, count);
      CHECK(out == sum);
      FindReduce(dtype, ReduceOp::kMax)(out.data(), pointers.data(), num_sources, count);
      CHECK(out == largest);
      FindReduce(dtype, ReduceOp::kMin)(out.data(), pointers.data(), num_sources, count);
      CHECK(out == smallest);
      // In place: dst is the first source.
      FindReduce(dtype, ReduceOp::kSum)(sources[0].data(), pointers.data(), num_sources, count);
      CHECK(sources[0] == sum);
    }
  }
}

TEST_CASE("NaN and signed zeros") {
  const float nan = NAN;
  const float values[][3] = {{1, nan, 2}, {nan, 1, 2}, {1, 2, nan}, {-0.0f, 0.0f, -0.0f}, {0.0f, -0.0f, 0.0f}};
  for (const auto& row : values) {
    const void* pointers[] = {&row[0], &row[1], &row[2]};
    float largest, smallest;
    FindReduce(DType::kF32, ReduceOp::kMax)(&largest, pointers, 3, 1);
    FindReduce(DType::kF32, ReduceOp::kMin)(&smallest, pointers, 3, 1);
    if (row[0] == 0) {
      CHECK(!std::signbit(largest));
      CHECK(std::signbit(smallest));
    } else {
      CHECK(std::isnan(largest));
      CHECK(std::isnan(smallest));
    }
  }
}

TEST_CASE("a reduction rounds once") {
  // 256 + 1 + 1: bf16 has 8 bits, so rounding after each addition would lose both ones.
  const uint16_t a = BFloat16::Encode(256), b = BFloat16::Encode(1);
  const void* pointers[] = {&a, &b, &b};
  uint16_t out;
  FindReduce(DType::kBF16, ReduceOp::kSum)(&out, pointers, 3, 1);
  CHECK(BFloat16::Decode(out) == 258);
}

TEST_CASE("the types that can be reduced have a function") {
  for (int type = 0; type <= static_cast<int>(DType::kF8E8M0FNU); ++type) {
    for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kMax, ReduceOp::kMin}) {
      const auto dtype = static_cast<DType>(type);
      CHECK(CanReduce(dtype, op) == (FindReduce(dtype, op) != nullptr));
    }
  }
}

TEST_CASE("every pattern of small floats and every midpoint between two") {
  CheckEveryPattern<BFloat16>();
  CheckEveryPattern<Float16>();
  CheckEveryPattern<Float8E5M2>();
  CheckEveryPattern<Float8E4M3>();
  CheckEveryPattern<Float8E3M4>();
  CheckEveryPattern<Float8E4M3FN>();
  CheckEveryPattern<Float8E4M3B11FNUZ>();
  CheckEveryPattern<Float8E5M2FNUZ>();
  CheckEveryPattern<Float8E4M3FNUZ>();
}

TEST_CASE("sum, maximum and minimum of every plain type") {
  CheckPlain<int8_t>(DType::kS8);
  CheckPlain<int16_t>(DType::kS16);
  CheckPlain<int32_t>(DType::kS32);
  CheckPlain<int64_t>(DType::kS64);
  CheckPlain<uint8_t>(DType::kU8);
  CheckPlain<uint16_t>(DType::kU16);
  CheckPlain<uint32_t>(DType::kU32);
  CheckPlain<uint64_t>(DType::kU64);
  CheckPlain<float>(DType::kF32);
  CheckPlain<double>(DType::kF64);
}

}  // namespace
}  // namespace jaxcomm
