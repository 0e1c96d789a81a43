// The hash that all processes must compute equally, against published outputs of SplitMix64.
#include <string>

#include "../../ffi/common/hash.h"
#include "../check.h"

namespace jaxcomm {
namespace {

// The first outputs of the reference implementation (Vigna, https://prng.di.unimi.it/splitmix64.c) from state 0, and
// from state 1234567.
TEST_CASE("numbers are mixed as SplitMix64 does") {
  constexpr uint64_t kIncrement = 0x9e3779b97f4a7c15;
  CHECK(Mix(0, uint64_t{0}) == 0xe220a8397b1dcdaf);
  CHECK(Mix(kIncrement, uint64_t{0}) == 0x6e789e6aa1b965f4);
  CHECK(Mix(2 * kIncrement, uint64_t{0}) == 0x06c45d188009454f);
  CHECK(Mix(0, uint64_t{1234567}) == 6457827717110365317u);
  CHECK(Mix(1234567, kIncrement) == 3203168211198807973u);  // hash and value are interchangeable
}

TEST_CASE("texts are mixed byte by byte, then their length") {
  CHECK(Mix(5, "") == Mix(5, uint64_t{0}));
  CHECK(Mix(5, "\xff") == Mix(Mix(5, uint64_t{255}), uint64_t{1}));
  CHECK(Mix(5, "ab") == Mix(Mix(Mix(5, uint64_t{'a'}), uint64_t{'b'}), uint64_t{2}));
}

}  // namespace
}  // namespace jaxcomm
