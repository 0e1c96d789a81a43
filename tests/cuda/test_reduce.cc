// Copy, CopyRanges and Reduce of the device API alone, emulated: all remainders of the unrolled loops, more sources
// than a thread loads at once, and the conversions of the kernels' 8-bit floats.
#include <cstring>
#include <random>
#include <vector>

#include "../../ffi/cuda/kernels/reductions.h"
#include "../../ffi/include/jaxcomm/device.h"
#include "../check.h"
#include "fakes/seed.h"

namespace jaxcomm {
namespace {

constexpr unsigned kThreads = 3;
constexpr int64_t kGuard = 16;  // elements on both sides that no function may write

template <typename T>
std::vector<T> Random(int64_t count, std::mt19937_64& random) {
  std::vector<T> values(count);
  for (T& value : values) value = static_cast<T>(static_cast<int>(random() % 2000) - 1000) / T(7);
  return values;
}

void TestCopy(int64_t bytes, int64_t to, int64_t from) {
  std::vector<char> src(bytes + 2 * kGuard), dst(bytes + 2 * kGuard, 'g');
  for (size_t i = 0; i < src.size(); ++i) src[i] = static_cast<char>(i * 31 + 1);
  std::vector<char> expected = dst;
  std::memcpy(expected.data() + to, src.data() + from, bytes);
  emulation::Launch(1, 1, kThreads, 1, [&] { device::Copy(dst.data() + to, src.data() + from, bytes); });
  CHECK(dst == expected);
}

// The operands are added from left to right in T, as a loop on the host adds them.
template <typename T, typename Op>
void TestSums(int num_sources, int64_t count, int64_t shift, std::mt19937_64& random) {
  std::vector<std::vector<T>> sources;
  for (int s = 0; s < num_sources; ++s) sources.push_back(Random<T>(count + kGuard, random));
  std::vector<T> dst(count + 2 * kGuard, T(1)), expected = dst;
  for (int64_t i = 0; i < count; ++i) {
    T sum = sources[0][i];
    for (int s = 1; s < num_sources; ++s) sum = static_cast<T>(sum + sources[s][i]);
    expected[i + shift] = sum;
  }
  emulation::Launch(1, 1, kThreads, 1, [&] {
    device::Reduce<arithmetic::Plain<T>, Op>(
        dst.data() + shift, num_sources, [&](int s) { return sources[s].data(); }, count);
  });
  CHECK(std::memcmp(dst.data(), expected.data(), dst.size() * sizeof(T)) == 0);
}

TEST_CASE("copies of all sizes and alignments") {
  for (int64_t bytes = 0; bytes < 3 * 16 * kThreads * device::kUnroll; bytes += bytes < 64 ? 1 : 13) {
    TestCopy(bytes, bytes % 3 == 0 ? 5 : 0, bytes % 3 == 0 ? 5 : bytes % 3 == 1 ? 4 : 0);
  }
}

// Ranges of different lengths and alignments, by blocks with whole and with partial warps.
void TestRanges(int32_t num, int64_t most_bytes, unsigned threads, std::mt19937_64& random) {
  std::vector<std::vector<char>> src(num), dst(num), expected;
  std::vector<int64_t> to, from, bytes;
  for (int32_t i = 0; i < num; ++i) {
    to.push_back(static_cast<int64_t>(random() % 16));
    from.push_back(random() % 2 == 0 ? to[i] : static_cast<int64_t>(random() % 16));
    bytes.push_back(i == 0 ? most_bytes : static_cast<int64_t>(random() % (most_bytes + 1)));
    for (int64_t k = 0; k < most_bytes + 2 * kGuard; ++k) src[i].push_back(static_cast<char>(random()));
    dst[i].resize(most_bytes + 2 * kGuard, 'g');
  }
  expected = dst;
  for (int32_t i = 0; i < num; ++i) std::memcpy(expected[i].data() + to[i], src[i].data() + from[i], bytes[i]);
  emulation::Launch(1, 1, threads, 1, [&] {
    device::CopyRanges(num, most_bytes, [&](int32_t i) {
      return device::CopyRange{dst[i].data() + to[i], src[i].data() + from[i], bytes[i]};
    });
  });
  CHECK(dst == expected);
}

TEST_CASE("copies of several ranges at once") {
  std::mt19937_64 random(FirstSeed());
  for (int64_t most_bytes = 0; most_bytes < 4 * device::kTileBytes; most_bytes += most_bytes < 40 ? 1 : 83) {
    TestRanges(1 + static_cast<int32_t>(random() % 9), most_bytes, 1 + random() % 12, random);
  }
}

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

TEST_CASE("sums of 1 to 20 sources, in order") {
  std::mt19937_64 random(FirstSeed());
  for (int num_sources = 1; num_sources <= 20; ++num_sources) {
    for (const int64_t count : {0, 1, 3, 4, 8, 17, 64, 97, 131}) {
      TestSums<float, arithmetic::Sum>(num_sources, count, count % 2 == 0 ? 0 : 1, random);
      TestSums<double, arithmetic::Sum>(num_sources, count, 0, random);
      TestSums<uint8_t, arithmetic::Sum>(num_sources, count, 0, random);
    }
  }
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
