// The first seed of a randomised test. JAXCOMM_TEST_SEED selects other schedules and data.
#pragma once

#include <cstdint>
#include <cstdlib>

namespace jaxcomm {

inline uint64_t FirstSeed() {
  const char* given = std::getenv("JAXCOMM_TEST_SEED");
  return given != nullptr ? std::strtoull(given, nullptr, 10) : 1;
}

}  // namespace jaxcomm
