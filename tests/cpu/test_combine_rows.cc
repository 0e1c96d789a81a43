// Weighted sums of rows against loops in float and double.
#include <cmath>
#include <cstdint>
#include <random>
#include <vector>

#include "../../ffi/cpu/combine_rows.h"
#include "../../ffi/cpu/token_sums.h"
#include "../../ffi/include/jaxcomm/small_float.h"
#include "../check.h"

namespace jaxcomm {
namespace {

// Every number of rows, nodes without rows, and lengths around those of vectors and tiles.
template <typename T, typename Acc, typename Decode, typename Encode>
void Compare(DType dtype, Decode decode, Encode encode) {
  std::mt19937 random(5);
  const CombineFn combine = FindCombine(dtype);
  CHECK(combine != nullptr);
  for (const int64_t count : {1, 7, 64, 511, 512, 513, 1031}) {
    for (int num = 0; num <= 11; ++num) {
      for (const int num_nodes : {1, 3}) {
        std::vector<std::vector<T>> rows(num, std::vector<T>(count));
        std::vector<const void*> pointers;
        std::vector<Acc> weights;
        for (auto& row : rows) {
          for (T& value : row) value = encode(static_cast<Acc>(static_cast<int>(random() % 2001) - 1000) / 64);
          pointers.push_back(row.data());
          weights.push_back(static_cast<Acc>(static_cast<int>(random() % 201) - 100) / 128);
        }
        std::vector<int32_t> ends(num_nodes, num);
        if (num_nodes == 3) ends[0] = ends[1] = num / 3;  // the second node has no rows
        for (const bool weighted : {true, false}) {
          std::vector<T> y(count);
          combine(y.data(), {pointers.data(), weighted ? weights.data() : nullptr, ends.data(), num_nodes}, count);
          for (int64_t i = 0; i < count; ++i) {
            Acc total = 0;
            int k = 0;
            for (const int32_t end : ends) {
              Acc part = 0;
              for (; k < end; ++k) {
                const Acc product = (weighted ? weights[k] : Acc(1)) * decode(rows[k][i]);
                part += product;
              }
              total += num_nodes == 1 ? part : decode(encode(part));
            }
            CHECK(y[i] == encode(total));
          }
        }
      }
    }
  }
}

TEST_CASE("sums of rows, node by node") {
  const auto same = [](auto x) { return x; };
  Compare<float, float>(DType::kF32, same, same);
  Compare<double, double>(DType::kF64, same, same);
  Compare<uint16_t, float>(DType::kBF16, BFloat16::Decode, BFloat16::Encode);
  Compare<uint16_t, float>(DType::kF16, Float16::Decode, Float16::Encode);
  CHECK(FindCombine(DType::kS32) == nullptr && FindCombine(DType::kF8E4M3FN) == nullptr);
}

TEST_CASE("the nodes of a token are added in their order, wherever the own one is") {
  const float rows[] = {1e8f, -1e8f, 0.5f, 1, 2};
  const int ends[] = {1, 2, 3, 5};  // of the nodes
  for (const int own_node : {-1, 3}) {
    Program program;
    program.row_count = 1;
    program.tokens.row_bytes = sizeof(float);
    program.tokens.combine = FindCombine(DType::kF32);
    TokenSums sums(program, 4, own_node);
    for (int node = 0, row = 0; node < 4; ++node) {
      for (; row < ends[node]; ++row) sums.AddRow(reinterpret_cast<const char*>(&rows[row]), 0, nullptr);
      sums.EndNode();
    }
    float y = 0;
    CHECK(sums.EndToken(reinterpret_cast<char*>(&y)) && sums.Flush() && y == 3.5f);
  }
}

}  // namespace
}  // namespace jaxcomm
