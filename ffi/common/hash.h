// A hash that has the same value in all processes, on any machine.
#pragma once

#include <cstdint>
#include <string_view>

namespace jaxcomm {

// Mixes a number into a hash (the finaliser of SplitMix64: Steele, Lea, Flood, OOPSLA 2014,
// doi 10.1145/2660193.2660195).
inline uint64_t Mix(uint64_t hash, uint64_t value) {
  uint64_t z = hash + 0x9e3779b97f4a7c15 + value;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
  z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
  return z ^ (z >> 31);
}

inline uint64_t Mix(uint64_t hash, std::string_view text) {
  for (const char c : text) hash = Mix(hash, static_cast<unsigned char>(c));
  return Mix(hash, text.size());
}

}  // namespace jaxcomm
