// Frames between the two halves of a transfer: a reader, and the source that it reads from.
#pragma once

#include <cstdint>
#include <cstring>
#include <string>
#include <type_traits>

namespace jaxcomm {

// Kinds of frames; `id` is a number of the reader's for the answer.
enum FrameKind : uint32_t {
  // Reader to source.
  // Key, version, lease in ms; digest of a manifest, and, unless it is empty, a read that begins if the manifest has
  // this digest: its id, whether the lease ends with it, its pieces. Answer: kOpenedFrame, and those of the read if it
  // begins; or kRefusedFrame.
  kOpenFrame = 1,
  kReadFrame,    // at: lease. Pieces. Answer: kDataFrames and kEndFrame, or kRefusedFrame
  kRenewFrame,   // at: lease
  kCloseFrame,   // at: lease
  kCancelFrame,  // the read or watch `id` is over
  kWatchFrame,   // at: a version; key. Answer: kNoticeFrame
  // Source to reader.
  kOpenedFrame,   // at: lease. Version, lease in ms, whether the read begins; if not, the manifest
  kRefusedFrame,  // at: a Code. Text
  kDataFrame,     // bulk; at: offset in the bytes of the read
  kEndFrame,      // the commit word: all bytes were valid until the last was packed
  kNoticeFrame,   // at: the newest version, later than the one watched
};

enum class Code : int32_t {
  kOk,
  kUnknown,    // no such object or ticket
  kGone,       // the version was retired, or the ticket used
  kRevoked,    // the lease ended while it was used
  kLost,       // the peer died, left or cannot be reached
  kTimeout,    // no answer in timeout_s
  kInvalid,    // a request that no reader of this version makes
  kCancelled,  // by this side
};

struct Error {
  Code code = Code::kOk;
  std::string text;

  bool ok() const { return code == Code::kOk; }
};

constexpr int64_t kLatest = -1;

class Encoder {
 public:
  template <typename T>
  void Put(T value) {
    static_assert(std::is_arithmetic_v<T>);
    out_.append(reinterpret_cast<const char*>(&value), sizeof value);
  }
  void PutText(const std::string& text) {
    Put(static_cast<uint32_t>(text.size()));
    out_ += text;
  }
  const std::string& bytes() const { return out_; }

 private:
  std::string out_;
};

// Each Get returns false if the bytes end before the value.
class Decoder {
 public:
  Decoder(const char* data, size_t bytes) : at_(data), left_(bytes) {}

  template <typename T>
  [[nodiscard]] bool Get(T* value) {
    static_assert(std::is_arithmetic_v<T>);
    if (left_ < sizeof *value) return false;
    std::memcpy(value, at_, sizeof *value);
    Skip(sizeof *value);
    return true;
  }
  [[nodiscard]] bool GetText(std::string* text) {
    uint32_t bytes = 0;
    if (!Get(&bytes) || left_ < bytes) return false;
    text->assign(at_, bytes);
    Skip(bytes);
    return true;
  }
  bool done() const { return left_ == 0; }

 private:
  void Skip(size_t bytes) {
    at_ += bytes;
    left_ -= bytes;
  }
  const char* at_;
  size_t left_;
};

}  // namespace jaxcomm
