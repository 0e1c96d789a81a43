// Sums, maxima and minima of every element type through the executor, against numbers whose bits this file computes.
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "../../ffi/cpu/executor.h"
#include "../../ffi/plan/algorithms.h"
#include "../check.h"

namespace jaxcomm {
namespace {

enum class Kind { kBool, kSigned, kUnsigned, kFloat, kComplex };

// Of floats and of the parts of complex numbers: widths of exponent and fraction, bias (IEEE 754; OCP 8-bit formats,
// 2023; ml_dtypes).
struct Type {
  DType dtype;
  Kind kind;
  int bytes;
  int exponent_bits = 0, fraction_bits = 0, bias = 0;
};

constexpr Type kTypes[] = {{DType::kBool, Kind::kBool, 1},
                           {DType::kS8, Kind::kSigned, 1},
                           {DType::kS16, Kind::kSigned, 2},
                           {DType::kS32, Kind::kSigned, 4},
                           {DType::kS64, Kind::kSigned, 8},
                           {DType::kU8, Kind::kUnsigned, 1},
                           {DType::kU16, Kind::kUnsigned, 2},
                           {DType::kU32, Kind::kUnsigned, 4},
                           {DType::kU64, Kind::kUnsigned, 8},
                           {DType::kF16, Kind::kFloat, 2, 5, 10, 15},
                           {DType::kBF16, Kind::kFloat, 2, 8, 7, 127},
                           {DType::kF32, Kind::kFloat, 4, 8, 23, 127},
                           {DType::kF64, Kind::kFloat, 8, 11, 52, 1023},
                           {DType::kC64, Kind::kComplex, 8, 8, 23, 127},
                           {DType::kC128, Kind::kComplex, 16, 11, 52, 1023},
                           {DType::kF8E5M2, Kind::kFloat, 1, 5, 2, 15},
                           {DType::kF8E4M3FN, Kind::kFloat, 1, 4, 3, 7},
                           {DType::kF8E4M3, Kind::kFloat, 1, 4, 3, 7},
                           {DType::kF8E3M4, Kind::kFloat, 1, 3, 4, 3},
                           {DType::kF8E4M3B11FNUZ, Kind::kFloat, 1, 4, 3, 11},
                           {DType::kF8E5M2FNUZ, Kind::kFloat, 1, 5, 2, 16},
                           {DType::kF8E4M3FNUZ, Kind::kFloat, 1, 4, 3, 8}};

// The bits of a number that the format holds exactly, as a normal one.
uint64_t FloatBits(const Type& type, double value) {
  if (value == 0) return 0;
  int exponent = 0;
  const double fraction = std::frexp(std::abs(value), &exponent) * 2 - 1;  // 1.f * 2^(exponent - 1)
  const auto biased = static_cast<uint64_t>(exponent - 1 + type.bias);
  const auto bits = static_cast<uint64_t>(std::ldexp(fraction, type.fraction_bits));
  const uint64_t sign = value < 0 ? 1 : 0;
  return (((sign << type.exponent_bits) | biased) << type.fraction_bits) | bits;
}

// Appends a small integer as an element. Unsigned types take negative ones modulo 2^bits; the imaginary part of complex
// ones is ten times the real one.
void Append(const Type& type, int value, std::string& data) {
  const auto put = [&](uint64_t bits, int bytes) { data.append(reinterpret_cast<const char*>(&bits), bytes); };
  if (type.kind == Kind::kComplex) {
    put(FloatBits(type, value), type.bytes / 2);
    put(FloatBits(type, 10 * value), type.bytes / 2);
  } else if (type.kind == Kind::kFloat) {
    put(FloatBits(type, value), type.bytes);
  } else {
    put(static_cast<uint64_t>(static_cast<int64_t>(value)), type.bytes);
  }
}

int Expected(const Type& type, ReduceOp op, int a, int b) {
  if (type.kind == Kind::kBool) return op == ReduceOp::kMin ? a & b : a | b;
  if (op == ReduceOp::kSum) return a + b;
  // Of unsigned numbers, negative ones are the large ones.
  const bool less = type.kind == Kind::kUnsigned && (a < 0) != (b < 0) ? b < 0 : a < b;
  return (op == ReduceOp::kMax) == less ? b : a;
}

// The results of all ranks, of which each has the same.
std::string AllReduce(const Type& type, ReduceOp op, const std::vector<std::string>& inputs) {
  const auto n = static_cast<int32_t>(inputs.size());
  const int64_t count = static_cast<int64_t>(inputs[0].size()) / type.bytes;
  Request request;
  request.collective = Collective::kAllReduce;
  request.geometry.ranks_per_node = n;
  request.block_count = count;
  const BlockLayout layout{1, count, count};
  const auto program = Program::Make(BuildAll(*FindAlgorithm(Collective::kAllReduce, "direct"), request), layout,
                                     layout, type.bytes, FindReduce(type.dtype, op));
  std::vector<std::string> outputs(n, std::string(inputs[0].size(), '\x55')), scratch(n);
  std::vector<RankBuffers> buffers(n);
  for (int32_t r = 0; r < n; ++r) {
    scratch[r].resize(program->plans[r].scratch_count * type.bytes);
    buffers[r] = {inputs[r].data(), outputs[r].data(), scratch[r].data()};
  }
  CHECK(Execution(program, buffers).Work());
  for (const std::string& output : outputs) CHECK(output == outputs[0]);
  return outputs[0];
}

TEST_CASE("sum, maximum and minimum of every type") {
  CHECK(std::size(kTypes) == static_cast<size_t>(DType::kF8E8M0FNU));  // the one type that is not reduced
  for (const Type& type : kTypes) {
    CHECK(type.bytes == ItemBytes(type.dtype));
    for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kMax, ReduceOp::kMin}) {
      if (type.kind == Kind::kComplex && op != ReduceOp::kSum) continue;
      std::vector<std::string> inputs(3);
      std::string expected;
      const int low = type.kind == Kind::kBool ? 0 : -2, high = type.kind == Kind::kBool ? 1 : 2;
      for (int a = low; a <= high; ++a) {
        for (int b = low; b <= high; ++b) {
          for (int c = low; c <= high; ++c) {
            Append(type, a, inputs[0]);
            Append(type, b, inputs[1]);
            Append(type, c, inputs[2]);
            Append(type, Expected(type, op, Expected(type, op, a, b), c), expected);
          }
        }
      }
      const bool same = AllReduce(type, op, inputs) == expected;
      if (!same) std::fprintf(stderr, "%s, operation %d\n", Name(type.dtype), static_cast<int>(op));
      CHECK(same);
    }
  }
}

// The two formats of these widths differ above 240: 160 + 128 is 288, or infinite.
TEST_CASE("float8_e4m3fn has large numbers, float8_e4m3 an infinity") {
  for (const auto& [dtype, sum] : {std::pair<DType, char>{DType::kF8E4M3FN, 0x79}, {DType::kF8E4M3, 0x78}}) {
    const Type type = {dtype, Kind::kFloat, 1, 4, 3, 7};
    std::vector<std::string> inputs(2);
    Append(type, 160, inputs[0]);
    Append(type, 128, inputs[1]);
    CHECK(AllReduce(type, ReduceOp::kSum, inputs) == std::string(1, sum));
  }
}

}  // namespace
}  // namespace jaxcomm
