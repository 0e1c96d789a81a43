// The recorder of a test program, and what is in its file.
#pragma once

#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>

#include "../../ffi/recorder/recorder.h"
#include "../check.h"

namespace jaxcomm {

constexpr int64_t kRecordedCalls = 100;

// Removed at the end.
inline const std::string& RecorderFolder() {
  static const struct Folder {
    std::string name = "/tmp/jaxcomm-test-recorder-XXXXXX";
    Folder() { CHECK(mkdtemp(name.data()) != nullptr); }
    ~Folder() { std::filesystem::remove_all(name); }
  } folder;
  return folder.name;
}

inline Recorder& Started() {
  Recorder& recorder = Recorder::Get();
  if (!recorder.started()) {
    CHECK(recorder.Start(RecorderFolder() + "/process-0.ring", kRecordedCalls, {0, 1, "1.0", "k", "n", "j"}).ok());
  }
  return recorder;
}

// The rows of a copy of the file.
struct RecordedRows {
  RecordedRows() {
    const std::string path = RecorderFolder() + "/copy";
    CHECK(Started().Dump(path).ok());
    std::ifstream file(path, std::ios::binary);
    text.assign(std::istreambuf_iterator<char>(file), {});
    CHECK(static_cast<int64_t>(text.size()) == at.file_bytes);
    CHECK(unlink(path.c_str()) == 0);
  }
  const RecordedCall* begin() const { return reinterpret_cast<const RecordedCall*>(text.data() + at.calls); }
  const RecordedCall* end() const { return begin() + kRecordedCalls; }
  const RecordedSite& site(int64_t i) const { return reinterpret_cast<const RecordedSite*>(text.data() + at.sites)[i]; }
  const RecordedGroup& group(int64_t i) const {
    return reinterpret_cast<const RecordedGroup*>(text.data() + at.groups)[i];
  }
  const RecorderHeader& header() const { return *reinterpret_cast<const RecorderHeader*>(text.data()); }
  std::string Text(uint64_t offset, uint64_t bytes) const { return text.substr(at.texts + offset, bytes); }
  std::string text;
  const RecorderOffsets at{kRecordedCalls};
};

}  // namespace jaxcomm
