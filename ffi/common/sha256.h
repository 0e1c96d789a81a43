// SHA-256 (FIPS 180-4) and HMAC-SHA256 (RFC 2104), so that the proof of a shared secret needs no library.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

namespace jaxcomm {

using Digest = std::array<uint8_t, 32>;

class Sha256 {
 public:
  void Update(const void* data, size_t bytes);
  Digest Finish();

 private:
  void Compress(const uint8_t* block);

  std::array<uint32_t, 8> state_ = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                    0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  std::array<uint8_t, 64> block_{};
  uint64_t bytes_ = 0;
};

// A key, prepared for many messages.
class Hmac {
 public:
  Hmac() = default;  // as with an empty key
  explicit Hmac(const std::string& key);

  void Update(const void* data, size_t bytes) { inner_.Update(data, bytes); }
  Digest Finish();

  // The MAC of one message.
  Digest Of(const std::string& message) const;

 private:
  Sha256 inner_;
  Sha256 outer_;
};

// Takes the same time wherever the two differ.
bool SameBytes(const void* a, const void* b, size_t bytes);

}  // namespace jaxcomm
