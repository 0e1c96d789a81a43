// CheckSlices: accepts what fits, and names both ranks of what does not.
#include <limits>
#include <string>

#include "slices.h"
#include "written.h"

namespace jaxcomm {
namespace {

constexpr int64_t kRanks[] = {10, 11, 12, 13, 14};

std::string Fault(const RaggedCase& c) {
  return CheckSlices(c.slices(), c.input_rows, c.output_rows, kRanks).message();
}

// Whether the slices are valid, by marking rows one by one.
bool Fits(RaggedCase c) {
  std::vector<std::vector<int>> written(c.n, std::vector<int>(c.output_rows));
  for (int32_t from = 0; from < c.n; ++from) {
    for (int64_t i = 0; i < c.n * c.per_pair; ++i) {
      const auto to = static_cast<int32_t>(i / c.per_pair);
      const int64_t size = c.At(from, 1, i);
      if (size != c.At(to, 3, from * c.per_pair + i % c.per_pair) || size < 0) return false;
      for (int64_t row = 0; row < size; ++row) {
        const int64_t in = c.At(from, 0, i) + row, out = c.At(from, 2, i) + row;
        if (in < 0 || in >= c.input_rows || out < 0 || out >= c.output_rows || ++written[to][out] > 1) return false;
      }
    }
  }
  return true;
}

TEST_CASE("random slices, and every change of one number") {
  std::mt19937 random(3);
  int faults = 0;
  for (int round = 0; round < 200; ++round) {
    RaggedCase c = DrawRagged(1 + round % 5, 1 + round % 3, random);
    CHECK(Fits(c) && Fault(c).empty());
    for (int change = 0; change < 20; ++change) {
      RaggedCase changed = c;
      changed.table[random() % c.table.size()] += static_cast<int64_t>(random() % 9) - 4;
      CHECK(Fits(changed) == Fault(changed).empty());
      faults += !Fault(changed).empty();
    }
  }
  CHECK(faults > 1000);
}

TEST_CASE("a fault names both ranks") {
  RaggedCase c;
  c.n = 2;
  c.per_pair = 2;
  c.input_rows = 4;
  c.output_rows = 8;
  // Every slice has one row.
  c.table = {0, 1, 2, 3, 1, 1, 1, 1, 0, 1, 0, 1, 1, 1, 1, 1,  //
             0, 1, 2, 3, 1, 1, 1, 1, 2, 3, 2, 3, 1, 1, 1, 1};
  Expect("", Fault(c));
  const auto with = [&](int32_t rank, int vector, int64_t slice, int64_t value) {
    RaggedCase changed = c;
    changed.At(rank, vector, slice) = value;
    return changed;
  };
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
  const std::string sizes = "send_sizes is 1 at rank 11 and recv_sizes is 1 at rank 10";
  Expect(
      "slice 1 from rank 11 to rank 10: send_sizes is 2 at rank 11 and recv_sizes is 1 at rank 10, expected equal "
      "sizes",
      Fault(with(1, 1, 1, 2)));
  Expect(
      "slice 1 from rank 11 to rank 10: it starts at row 4 of the operand (input_offsets of rank 11), but the operand "
      "has 4 rows; " +
          sizes,
      Fault(with(1, 0, 1, 4)));
  Expect(
      "slice 1 from rank 11 to rank 10: it goes to row 8 of the output (output_offsets of rank 11), but the output has "
      "8 rows; " +
          sizes,
      Fault(with(1, 2, 1, 8)));
  for (const int64_t far : {int64_t{-1}, -kMost, kMost}) {
    CHECK(!Fault(with(1, 0, 1, far)).empty() && !Fault(with(1, 2, 1, far)).empty());
  }
  RaggedCase large = with(1, 1, 1, kMost);
  large.At(0, 3, 3) = kMost;
  CHECK(Fault(large).find("but the operand has 4 rows") != std::string::npos);
  large.At(1, 1, 1) = large.At(0, 3, 3) = -1;
  CHECK(Fault(large).find("expected at least 0") != std::string::npos);
  Expect(
      "rank 10 writes rows [1, 2) and rank 11 writes rows [1, 2) of the output of rank 10: slices must not overlap "
      "there",
      Fault(with(1, 2, 1, 1)));
}

}  // namespace
}  // namespace jaxcomm
