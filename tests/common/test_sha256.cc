#include <algorithm>
#include <cstdio>
#include <string>

#include "../check.h"
#include "common/sha256.h"

namespace jaxcomm {
namespace {

std::string Hex(const Digest& digest) {
  std::string text;
  char two[3];
  for (const uint8_t byte : digest) {
    std::snprintf(two, sizeof two, "%02x", byte);
    text += two;
  }
  return text;
}

std::string HashOf(const std::string& text, size_t step) {
  Sha256 hash;
  for (size_t at = 0; at < text.size(); at += step) hash.Update(text.data() + at, std::min(step, text.size() - at));
  return Hex(hash.Finish());
}

TEST_CASE("SHA-256 of the examples of FIPS 180") {
  CHECK(HashOf("", 1) == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  CHECK(HashOf("abc", 3) == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  CHECK(HashOf("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq", 5) ==
        "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
  for (const size_t step : {1, 63, 64, 65, 1000000}) {
    CHECK(HashOf(std::string(1000000, 'a'), step) ==
          "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
  }
}

TEST_CASE("HMAC-SHA256 of RFC 4231, with keys below and above a block; digests that differ anywhere") {
  CHECK(Hex(Hmac(std::string(20, '\x0b')).Of("Hi There")) ==
        "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7");
  CHECK(Hex(Hmac("Jefe").Of("what do ya want for nothing?")) ==
        "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");
  CHECK(Hex(Hmac(std::string(131, '\xaa')).Of("Test Using Larger Than Block-Size Key - Hash Key First")) ==
        "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54");
  // A key of exactly a block: Python's hmac.
  CHECK(Hex(Hmac(std::string(64, '\xaa')).Of("Test Using Larger Than Block-Size Key - Hash Key First")) ==
        "84332a7580ed3cf75de83c644c8d2c1c262ad90e0190e5c5ae4b82b2102e8e75");
  CHECK(SameBytes("abcd", "abcd", 4));
  CHECK(!SameBytes("abcd", "abce", 4));
  CHECK(!SameBytes("abcd", "bbcd", 4));
}

}  // namespace
}  // namespace jaxcomm
