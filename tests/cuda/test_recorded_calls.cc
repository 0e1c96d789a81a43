// Calls of one GPU in the flight recorder: its lanes, starts of one line, the group of a local GPU, and waits.
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <string>

#include "../../ffi/cuda/runtime/recorded_calls.h"
#include "fakes/alone.h"

namespace jaxcomm {
namespace cuda {
namespace {

constexpr int64_t kCalls = 16;

// A copy of the recorder's file.
struct File {
  File() {
    const std::string path = Recorder::Get().path() + ".copy";
    CHECK(Recorder::Get().Dump(path).ok());
    std::ifstream file(path, std::ios::binary);
    bytes.assign(std::istreambuf_iterator<char>(file), {});
  }
  template <typename Row>
  const Row& At(int64_t table, uint64_t row) const {
    return reinterpret_cast<const Row*>(bytes.data() + table)[row];
  }
  // The call with this number among all; null if there is none.
  const RecordedCall* Find(uint64_t number) const {
    for (uint64_t i = 0; i < kCalls; ++i) {
      if (At<RecordedCall>(offsets.calls, i).number == number) return &At<RecordedCall>(offsets.calls, i);
    }
    return nullptr;
  }
  const RecordedCall& Call(uint64_t number) const {
    CHECK(Find(number) != nullptr);
    return *Find(number);
  }
  const RecordedSite& Site(uint64_t number) const { return At<RecordedSite>(offsets.sites, Call(number).site); }
  std::string Ranks(uint64_t number) const {
    const auto& group = At<RecordedGroup>(offsets.groups, Site(number).group);
    return bytes.substr(static_cast<size_t>(offsets.texts) + group.ranks, group.ranks_bytes);
  }

  const RecorderOffsets offsets{kCalls};
  std::string bytes;
};

// A program that is compiled again and again: its calls go, and the recorder forgets them, but not at once.
ALONE_TEST_CASE("calls that have gone") {
  char folder[] = "/tmp/jaxcomm-test-recorded-XXXXXX";
  CHECK(mkdtemp(folder) != nullptr);
  CHECK(Recorder::Get().Start(std::string(folder) + "/ring", kCalls, {}).ok());
  CallSpec spec;
  spec.op = "psum";
  RecordedCalls calls;
  device::Progress progress;
  const auto look = [&](uint64_t number, uint64_t call_id) {
    progress.begun = number << 32 | call_id;
    progress.ended = number;
    calls.Look(progress);
    return File().Find(number) != nullptr;
  };
  for (uint64_t call_id = 0; call_id < 300; ++call_id) {
    calls.Add(call_id, spec, 0, 0, 0, DType::kF32, 5, 5);
    calls.Remove(call_id);
  }
  CHECK(look(1, 299) && look(2, 44) && !look(3, 43) && !look(4, 0));
}

// GPU 3 of a process with four, which form two groups; at last, GPU 1.
ALONE_TEST_CASE("calls of two lanes, and two starts of one line") {
  char folder[] = "/tmp/jaxcomm-test-recorded-XXXXXX";
  CHECK(mkdtemp(folder) != nullptr);
  CHECK(Recorder::Get().Start(std::string(folder) + "/ring", kCalls, {}).ok());
  CallSpec spec;
  spec.op = "psum_start";
  spec.site = "here.py:1";
  spec.group_size = 2;
  spec.groups = {0, 1, 2, 3};
  spec.processes = {0, 0, 0, 0};
  RecordedCalls synchronous, asynchronous;
  synchronous.Add(1, spec, 0, 3, 1, DType::kF32, 5, 5);
  spec.asynchronous = 1;
  for (const int64_t number : {0, 1}) {
    spec.number = number;
    asynchronous.Add(static_cast<uint64_t>(1 + number), spec, 0, 3, 1, DType::kF32, 5, 5);
  }
  device::Progress progress;
  progress.begun = uint64_t{1} << 32 | 1;
  synchronous.Look(progress);
  asynchronous.Look(progress);
  progress.ended = 1;
  asynchronous.Look(progress);
  progress.begun = uint64_t{2} << 32 | 2;
  asynchronous.Look(progress);
  progress.waits_for = 0;  // rank 0 of the group
  progress.waits_ns = 9;
  asynchronous.Look(progress);
  const File waiting;
  for (uint64_t number = 1; number <= 3; ++number) CHECK(waiting.Ranks(number) == "2-3");
  // Each lane counts its own calls, so it is a group of its own.
  CHECK(waiting.Site(1).group != waiting.Site(2).group && waiting.Site(2).group == waiting.Site(3).group);
  CHECK(waiting.Site(2).identity != waiting.Site(3).identity && waiting.Call(2).key != waiting.Call(3).key);
  CHECK(waiting.Call(3).waiting_rank == 1 + 3 && waiting.Call(3).waiting_peer == 1 + 2);
  asynchronous.Look(progress);
  const File later;
  CHECK(later.Call(3).waiting_rank == 0 && later.Call(3).phase == static_cast<uint32_t>(CallPhase::kRunning));
  RecordedCalls other;
  other.Add(2, spec, 0, 1, 1, DType::kF32, 5, 5);
  other.Look(progress);
  CHECK(File().Ranks(4) == "0-1");
}

}  // namespace
}  // namespace cuda
}  // namespace jaxcomm
