#include "common/sha256.h"

#include <algorithm>
#include <cstring>

namespace jaxcomm {
namespace {

constexpr uint32_t kRound[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

uint32_t Rotate(uint32_t x, int by) { return x >> by | x << (32 - by); }

}  // namespace

void Sha256::Compress(const uint8_t* block) {
  uint32_t w[64];
  for (int i = 0; i < 16; ++i) {
    w[i] = uint32_t{block[4 * i]} << 24 | uint32_t{block[4 * i + 1]} << 16 | uint32_t{block[4 * i + 2]} << 8 |
           uint32_t{block[4 * i + 3]};
  }
  for (int i = 16; i < 64; ++i) {
    const uint32_t a = Rotate(w[i - 15], 7) ^ Rotate(w[i - 15], 18) ^ w[i - 15] >> 3;
    const uint32_t b = Rotate(w[i - 2], 17) ^ Rotate(w[i - 2], 19) ^ w[i - 2] >> 10;
    w[i] = w[i - 16] + a + w[i - 7] + b;
  }
  std::array<uint32_t, 8> s = state_;
  for (int i = 0; i < 64; ++i) {
    const uint32_t sum1 = Rotate(s[4], 6) ^ Rotate(s[4], 11) ^ Rotate(s[4], 25);
    const uint32_t choice = (s[4] & s[5]) ^ (~s[4] & s[6]);
    const uint32_t first = s[7] + sum1 + choice + kRound[i] + w[i];
    const uint32_t sum0 = Rotate(s[0], 2) ^ Rotate(s[0], 13) ^ Rotate(s[0], 22);
    const uint32_t majority = (s[0] & s[1]) ^ (s[0] & s[2]) ^ (s[1] & s[2]);
    s = {first + sum0 + majority, s[0], s[1], s[2], s[3] + first, s[4], s[5], s[6]};
  }
  for (size_t i = 0; i < 8; ++i) state_[i] += s[i];
}

void Sha256::Update(const void* data, size_t bytes) {
  const auto* at = static_cast<const uint8_t*>(data);
  while (bytes > 0) {
    const size_t filled = bytes_ % 64;
    const size_t count = std::min(bytes, 64 - filled);
    std::memcpy(block_.data() + filled, at, count);
    bytes_ += count;
    at += count;
    bytes -= count;
    if (filled + count == 64) Compress(block_.data());
  }
}

Digest Sha256::Finish() {
  const uint64_t bits = bytes_ * 8;
  const uint8_t one = 0x80, zero = 0;
  Update(&one, 1);
  while (bytes_ % 64 != 56) Update(&zero, 1);
  uint8_t length[8];
  for (int i = 0; i < 8; ++i) length[i] = static_cast<uint8_t>(bits >> (56 - 8 * i));
  Update(length, 8);
  Digest digest;
  for (size_t i = 0; i < 32; ++i) digest[i] = static_cast<uint8_t>(state_[i / 4] >> (24 - 8 * (i % 4)));
  return digest;
}

Hmac::Hmac(const std::string& key) {
  std::array<uint8_t, 64> block{};
  if (key.size() > block.size()) {
    Sha256 hash;
    hash.Update(key.data(), key.size());
    const Digest digest = hash.Finish();
    std::copy(digest.begin(), digest.end(), block.begin());
  } else {
    std::copy(key.begin(), key.end(), block.begin());
  }
  for (uint8_t& byte : block) byte ^= 0x36;
  inner_.Update(block.data(), block.size());
  for (uint8_t& byte : block) byte ^= 0x36 ^ 0x5c;
  outer_.Update(block.data(), block.size());
}

Digest Hmac::Finish() {
  const Digest inner = inner_.Finish();
  outer_.Update(inner.data(), inner.size());
  return outer_.Finish();
}

Digest Hmac::Of(const std::string& message) const {
  Hmac mac = *this;
  mac.Update(message.data(), message.size());
  return mac.Finish();
}

bool SameBytes(const void* a, const void* b, size_t bytes) {
  uint8_t differ = 0;
  for (size_t i = 0; i < bytes; ++i) {
    differ = static_cast<uint8_t>(differ | (static_cast<const uint8_t*>(a)[i] ^ static_cast<const uint8_t*>(b)[i]));
  }
  return differ == 0;
}

}  // namespace jaxcomm
