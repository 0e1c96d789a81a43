// A mixing function for hashes.
#pragma once

#include <cstdint>

namespace jaxcomm {

inline uint64_t Mix(uint64_t x) {  // splitmix64, Steele, Lea, Flood, OOPSLA 2014
  x += 0x9e3779b97f4a7c15;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

}  // namespace jaxcomm
