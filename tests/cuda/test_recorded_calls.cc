// GPUs in the flight recorder: lanes, starts of one line, groups of local GPUs, replays, waits; and the watchdog.
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <memory>
#include <string>
#include <vector>

#include "../../ffi/cuda/runtime/recorded_calls.h"
#include "../../ffi/cuda/runtime/watchdog.h"
#include "fakes/machine.h"
// Must follow CUDA's headers: see gpu_fake.h.

namespace jaxcomm {
namespace cuda {
namespace {

using namespace fake;

constexpr int64_t kCalls = 16;
constexpr auto kDone = static_cast<uint32_t>(CallPhase::kDone), kRunning = static_cast<uint32_t>(CallPhase::kRunning);

void StartRecorder() {
  char folder[] = "/tmp/jaxcomm-test-recorded-XXXXXX";
  CHECK(mkdtemp(folder) != nullptr);
  CHECK(Recorder::Get().Start(std::string(folder) + "/ring", kCalls, {}).ok());
}

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
  // The call of a rank with this number in its group.
  const RecordedCall* Find(uint64_t sequence, int32_t rank) const {
    for (uint64_t i = 0; i < kCalls; ++i) {
      const auto& call = At<RecordedCall>(offsets.calls, i);
      if (call.number != 0 && call.sequence == sequence && call.arrived_mask == uint64_t{1} << rank) return &call;
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
  StartRecorder();
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

// GPU 3 of a process with four, which form two groups; at last, GPU 2.
ALONE_TEST_CASE("calls of two lanes, and two starts of one line") {
  StartRecorder();
  CallSpec spec;
  spec.op = "psum_start";
  spec.site = "here.py:1";
  spec.group_size = 2;
  spec.groups = {0, 2, 1, 3};
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
  for (uint64_t number = 1; number <= 3; ++number) CHECK(waiting.Ranks(number) == "1,3");
  // Each lane counts its own calls, so it is a group of its own.
  CHECK(waiting.Site(1).group != waiting.Site(2).group && waiting.Site(2).group == waiting.Site(3).group);
  CHECK(waiting.Site(2).identity != waiting.Site(3).identity && waiting.Call(2).key != waiting.Call(3).key);
  CHECK(waiting.Call(3).waiting_rank == 1 + 3 && waiting.Call(3).waiting_peer == 1 + 1);
  asynchronous.Look(progress);
  const File later;
  CHECK(later.Call(3).waiting_rank == 0 && later.Call(3).phase == kRunning);
  RecordedCalls other;
  spec.op = "psum";
  other.Add(2, spec, 0, 2, 1, DType::kF32, 5, 5);
  other.Look(progress);
  CHECK(File().Ranks(4) == "0,2" && File().Site(4).identity != waiting.Site(3).identity);
  spec.site = "there.py:1";
  // Rank 1 of its group, and the first one of this process.
  spec.processes = {1, 0, 1, 0};
  RecordedCalls apart;
  apart.Add(2, spec, 0, 0, 1, DType::kF32, 5, 5);
  apart.Look(progress);
  CHECK(File().Ranks(5) == "0,2" && File().Call(5).arrived_mask == 1);
  CHECK(File().Site(5).identity != File().Site(4).identity);
  progress.begun = uint64_t{4} << 32 | 2;  // nobody looked when the second call ended and when the third one ran
  apart.Look(progress);
  CHECK(File().Call(5).phase == kDone && File().Call(6).sequence == 4 && File().Call(6).phase == kRunning);
}

// The recorder sees each replay of a call, by its number on the communicator, and the rank for which a kernel waits.
ALONE_TEST_CASE("calls of kernels") {
  constexpr int kRanks = 2;
  constexpr int64_t kCount = 40000;  // several channels
  StartRecorder();
  const auto look = [] {
    Communicator::RecordProgress();
    return File();
  };
  std::vector<Communicator*> communicators(kRanks);
  std::vector<std::unique_ptr<DeviceCall>> calls(2 * kRanks);
  Communicator::Configure(20, 4);
  OnRanks(*new World(kRanks), [&](Rank& rank) {
    Communicator& communicator = *(communicators[rank.rank] = ValueOf(Get(rank)));
    Stream stream;
    std::vector<int32_t> x(kCount, 1), y(kRanks * kCount);
    for (const bool ll : {true, false}) {
      const CallSpec spec = SpecOf(ll ? Collective::kAllReduce : Collective::kAllGather, kRanks, ll ? "ll" : "direct");
      const int64_t count = ll ? 5 : kCount, output_count = ll ? 5 : kRanks * kCount;
      auto& call = calls[2 * rank.rank + (ll ? 0 : 1)];
      call = ValueOf(DeviceCall::Make(spec, communicator, DType::kS32, count, output_count));
      for (int replay = 0; replay < 3; ++replay) CHECK(call->Launch(x.data(), y.data(), stream.handle()).ok());
    }
    fake::Wait(stream.handle());
  });
  CHECK(communicators[0]->comm().abort_flag != communicators[1]->comm().abort_flag);  // of each GPU
  const File ended = look();
  const uint64_t key = ended.Find(6, 0)->key;
  for (int r = 0; r < kRanks; ++r) {
    const RecordedCall& call = *ended.Find(6, r);
    CHECK(call.phase == kDone && call.input_count == kCount && call.output_count == kRanks * kCount);
    CHECK(call.dtype == static_cast<uint32_t>(DType::kS32) && call.iteration == 5);
    CHECK(call.key != 0 && call.key == key);
    CHECK(communicators[r]->comm().report->progress.ended == 6);
  }
  // Rank 1 has begun a seventh call, and waits for rank 0.
  device::Progress& progress = communicators[1]->comm().report->progress;
  progress.begun += uint64_t{1} << 32;
  const File begun = look();
  CHECK(begun.Find(7, 1)->phase == kRunning && begun.Find(7, 1)->waiting_peer == 0);
  CHECK(begun.Find(7, 1)->key != key && begun.Find(7, 0) == nullptr);
  for (uint64_t time_ns = 1; time_ns < 3; ++time_ns) {
    progress.waits_for = 7;  // rank 0, step 7
    progress.waits_ns = time_ns;
    const File waits = look();
    CHECK(waits.Find(7, 1)->phase == kRunning);
    CHECK(waits.Find(7, 1)->waiting_rank == 1 + 1 && waits.Find(7, 1)->waiting_peer == 1 + 0);
  }
  progress.ended = 7;
  const File over = look();
  CHECK(over.Find(7, 1)->phase == kDone && over.Find(7, 1)->waiting_peer == 0);
  // Of the calls that have gone, it knows the last 256.
  calls.clear();
  OnRanks(*new World(kRanks), [&](Rank& rank) {
    rank.number = communicators[rank.rank]->device();
    Communicator& communicator = *ValueOf(Get(rank));
    const CallSpec spec = SpecOf(Collective::kDispatch, kRanks);
    for (int i = 0; i < 256; ++i)
      ValueOf(DeviceCall::Make(spec, communicator, RouteAndDispatchShape{1, 1, 2, 2, 1, 0, 16}));
  });
  progress.begun += uint64_t{1} << 32;
  CHECK(look().Find(8, 1) == nullptr);
  for (const Communicator* const each : communicators) {  // the last call of one of them
    each->comm().report->progress.begun =
        uint64_t{9} << 32 | (CallName("next").number() - 1 - (each == communicators[1]));
  }
  const File moe = look();
  const RecordedCall* const last = moe.Find(9, 0) != nullptr ? moe.Find(9, 0) : moe.Find(9, 1);
  CHECK(last != nullptr && last->input_count == 16 && last->output_count == 2 * 16);
}

TEST_CASE("the watchdog reports the abort of a kernel, and ends the process") {
  const std::string said = Alone([] {
    StartRecorder();
    Communicator::Configure(20, 4);
    OnRanks(*new World(1), [](Rank& rank) {
      device::Report& report = *ValueOf(Get(rank))->comm().report;
      static std::atomic<int> num_ends{0};
      for (int i = 0; i < 2; ++i) StartWatchdog([] { ++num_ends; }, 0.01);
      CHECK(num_ends == 0);
      report.state = device::Report::kComplete;
      while (num_ends == 0) std::this_thread::yield();
    });
    CHECK(Has(File().bytes, ": rank 0 aborted in step 0: rank 0 did not signal"));
  });
  CHECK(Count(said, "This process has lost its GPU and ends within 0.01 s\n") == 1 &&
        Has(said, "jaxcomm: a call: rank"));
}

}  // namespace
}  // namespace cuda
}  // namespace jaxcomm
