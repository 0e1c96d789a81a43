// Cost of the flight recorder without XLA: a record alone, and chains of calls on 8 devices. Rounds with and without
// recorder take turns; the median of their differences is printed, with its 95 % interval.
//
//     make libraries && c++ -O2 -std=c++17 -Iffi benchmarks/recorder.cc -Lbuild/module -ljaxcomm_native -pthread -ldl \
//       -o build/recorder && build/recorder
#include "recorder/recorder.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "cpu/rendezvous.h"

namespace jaxcomm {
namespace {

constexpr int64_t kDevices = 8, kCount = 256, kRows = 4096;  // blocks of 1 KiB
constexpr int kRounds = 1001, kCalls = 500;

double TimeNs(const std::function<void()>& f) {
  const auto start = std::chrono::steady_clock::now();
  f();
  return std::chrono::duration<double, std::nano>(std::chrono::steady_clock::now() - start).count();
}

// `f` makes kCalls calls.
void Compare(const char* name, const std::function<void()>& f) {
  std::vector<double> differences, without;
  for (double ns = 0; ns < 5e8;) ns += TimeNs(f);  // untimed; also until FastClock has compared the clocks
  for (int round = 0; round < kRounds; ++round) {
    double ns[2];
    for (const int paused : {round % 2, 1 - round % 2}) {
      Recorder::Get().Pause(paused != 0);
      ns[paused] = TimeNs(f) / kCalls;
    }
    differences.push_back(ns[0] - ns[1]);
    without.push_back(ns[1]);
  }
  std::sort(differences.begin(), differences.end());
  std::sort(without.begin(), without.end());
  const auto half = static_cast<int>(0.98 * std::sqrt(kRounds));
  std::printf("%-34s %7.0f ns, recorder %4.0f (%4.0f to %4.0f) ns\n", name, without[kRounds / 2],
              differences[kRounds / 2], differences[kRounds / 2 - half], differences[kRounds / 2 + half]);
}

// A device that calls `rendezvous` again as soon as its call has ended.
struct Device {
  class Again : public Completion {
   public:
    explicit Again(Device& device) : device_(device) {}
    void Succeed() override { device_.Next(); }
    void Fail(const Status& error) override {
      std::fprintf(stderr, "%s\n", error.message().c_str());
      std::abort();
    }

   private:
    Device& device_;
  };

  void Next() {
    if (left == 0) {
      ended->fetch_add(1);
      return;
    }
    --left;
    Participant participant;
    participant.run_id = 1;
    participant.iteration = iteration++;
    participant.rank = rank;
    participant.input = reinterpret_cast<const char*>(x.data());
    participant.output = reinterpret_cast<char*>(y.data());
    participant.input_count = participant.output_count = kCount;
    rendezvous->Arrive(participant, std::make_unique<Again>(*this));
  }

  Rendezvous* rendezvous = nullptr;
  std::atomic<int>* ended = nullptr;
  int64_t rank = 0, iteration = 0;
  int left = 0;
  std::vector<float> x = std::vector<float>(kCount), y = std::vector<float>(kCount);
};

void Chain(Collective op, const char* name) {
  CallSpec spec;
  spec.collective = op;
  spec.op = name;
  spec.site = "here.py:1";
  spec.group_size = kDevices;
  for (int64_t rank = 0; rank < kDevices; ++rank) spec.groups.push_back(rank);
  spec.ranks_per_node = kDevices;
  const auto rendezvous = *Rendezvous::Make(spec);
  CompletionPool::Get().EnsureThreads(kDevices);
  std::atomic<int> ended{0};
  std::vector<Device> devices(kDevices);
  for (int64_t rank = 0; rank < kDevices; ++rank) {
    devices[rank].rendezvous = rendezvous.get();
    devices[rank].ended = &ended;
    devices[rank].rank = rank;
  }
  Compare(name, [&] {
    ended = 0;
    for (Device& device : devices) device.left = kCalls;
    for (Device& device : devices) device.Next();
    while (ended < kDevices) std::this_thread::sleep_for(std::chrono::microseconds(50));
  });
}

int Run() {
  char folder[] = "/tmp/jaxcomm-benchmark-recorder-XXXXXX";
  if (mkdtemp(folder) == nullptr) return 1;
  const std::string path = std::string(folder) + "/ring";
  if (!Recorder::Get().Start(path, kRows, {}).ok()) return 1;
  unlink(path.c_str());
  rmdir(folder);
  const uint32_t site = Recorder::Get().AddSite("psum at a.py:1", "ring", 1, 2, {0, 1}, {0, 0});
  std::vector<char> others(2 << 20);  // more than the caches of a processor that are its own
  for (const bool cold : {false, true}) {
    for (const bool counts : {true, false}) {
      const std::string name =
          std::string("record, ") + (cold ? "out of the cache" : "in the cache") + (counts ? "" : ", no counters");
      Compare(name.c_str(), [&] {
        if (cold) {
          for (size_t i = 0; i < others.size(); i += 64) ++others[i];
        }
        for (int i = 0; i < kCalls; ++i) {
          const CallRecord record = Recorder::Get().Begin(site, 7, i, 0, kCount, kCount, Recorder::Clock::time_point());
          record.Started(9);
          record.SetPhase(CallPhase::kRunning);
          record.End(true, counts);
        }
      });
    }
  }
  Chain(Collective::kAllReduce, "psum, 8 devices");
  Chain(Collective::kBarrier, "barrier, 8 devices");
  return 0;
}

}  // namespace
}  // namespace jaxcomm

int main() {
  std::exit(jaxcomm::Run());  // not by returning: threads of the pool still run
}
