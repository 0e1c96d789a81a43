// Stress: many call sites, runs and iterations at once, devices in random order and with random delays; late devices.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <random>
#include <thread>
#include <vector>

#include "arrivals.h"

namespace jaxcomm {
namespace {

// Of every case: threads for all devices, and no deadline that a slow machine could meet.
void Prepare() {
  Completer::Get().EnsureThreads(8);
  Meeting::SetLimits({60, 30});
}

// Devices are threads that arrive at every site of every run without waiting for earlier ones, each in its own order of
// sites. Every output must be that of its own site, run and iteration.
void IndependentCalls(int round) {
  constexpr int64_t kRanks = 8;
  constexpr int kSites = 12;
  constexpr int kIterations = 5;
  std::string error;
  std::vector<std::shared_ptr<Meeting>> sites;
  std::vector<int64_t> counts;
  for (int s = 0; s < kSites; ++s) {
    const int64_t group_size = s % 3 == 2 ? 4 : kRanks;
    CallSpec spec = Spec(Collective::kAllReduce, kRanks, group_size, "psum");
    if (s % 4 == 3) {
      spec.ranks_per_node = group_size / 2;
      spec.algorithm = "hierarchical";
    }
    if (s % 4 == 1) spec.algorithm = "ring";
    sites.push_back(Meeting::Make(spec, &error));
    CHECK(sites.back() != nullptr);
    counts.push_back(s % 5 == 4 ? 40000 : 64);  // the large ones call for helpers
  }
  struct Call {
    std::vector<int32_t> input, output;
  };
  std::vector<std::vector<Call>> calls(kRanks, std::vector<Call>(kSites * kIterations));
  const auto value = [&](int64_t rank, int site, int iteration) {
    return static_cast<int32_t>(rank + 1000 * site + 100000 * iteration + 7 * round);
  };
  Counter counter;
  std::vector<std::thread> devices;
  for (int64_t rank = 0; rank < kRanks; ++rank) {
    devices.emplace_back([&, rank] {
      std::mt19937 random(static_cast<unsigned>(rank + 100 * round));
      for (int iteration = 0; iteration < kIterations; ++iteration) {
        std::vector<int> order(kSites);
        for (int s = 0; s < kSites; ++s) order[s] = s;
        std::shuffle(order.begin(), order.end(), random);
        for (const int s : order) {
          Call& call = calls[rank][s * kIterations + iteration];
          call.input.assign(counts[s], value(rank, s, iteration));
          call.output.assign(counts[s], -1);
          Arrival arrival;
          arrival.run = 1 + round;
          arrival.rank = rank;
          arrival.input = reinterpret_cast<const char*>(call.input.data());
          arrival.output = reinterpret_cast<char*>(call.output.data());
          arrival.dtype = DType::kS32;
          arrival.input_count = arrival.output_count = counts[s];
          sites[s]->Arrive(arrival, std::make_unique<CountCompletion>(counter));
          if (random() % 8 == 0) std::this_thread::yield();
        }
      }
    });
  }
  for (auto& device : devices) device.join();
  CHECK(counter.WaitFor(kRanks * kSites * kIterations));
  CHECK(counter.errors().empty());
  for (int64_t rank = 0; rank < kRanks; ++rank) {
    for (int s = 0; s < kSites; ++s) {
      const int64_t group_size = s % 3 == 2 ? 4 : kRanks;
      for (int iteration = 0; iteration < kIterations; ++iteration) {
        int32_t expected = 0;
        for (int64_t peer = rank / group_size * group_size; peer < (rank / group_size + 1) * group_size; ++peer) {
          expected += value(peer, s, iteration);
        }
        for (const int32_t out : calls[rank][s * kIterations + iteration].output) CHECK(out == expected);
      }
    }
  }
}

// As XLA's programs do: what runs inside a completion waits until all other devices of the round got theirs. Quick
// rounds in between let the queue run empty at every possible moment.
class BlockingCompletion : public Completion {
 public:
  BlockingCompletion(Counter& inside, Counter& finished, int wait_for)
      : inside_(inside), finished_(finished), wait_for_(wait_for) {}
  void Succeed() override {
    inside_.Add(nullptr);
    CHECK(inside_.WaitFor(wait_for_));
    finished_.Add(nullptr);
  }
  void Fail(const Error& error) override { finished_.Add(&error); }

 private:
  Counter& inside_;
  Counter& finished_;
  const int wait_for_;
};

void ContinuationsThatWait(int num_rounds) {
  constexpr int kRanks = 8;
  std::string error;
  const auto site = Meeting::Make(Spec(Collective::kAllReduce, kRanks, kRanks, "psum"), &error);
  std::vector<float> in(kRanks, 1), out(kRanks);
  for (int round = 0; round < num_rounds; ++round) {
    const bool blocking = round % 3 == 0;
    // The last to arrive completes its own promise at once, in its own call: that one doesn't wait.
    Counter inside, finished;
    for (int64_t rank = 0; rank < kRanks; ++rank) {
      Arrival arrival;
      arrival.run = 5000 + round;
      arrival.rank = rank;
      arrival.input = reinterpret_cast<const char*>(&in[rank]);
      arrival.output = reinterpret_cast<char*>(&out[rank]);
      arrival.input_count = arrival.output_count = 1;
      const int wait_for = blocking && rank + 1 < kRanks ? kRanks : 1;
      site->Arrive(arrival, std::make_unique<BlockingCompletion>(inside, finished, wait_for));
    }
    CHECK(finished.WaitFor(kRanks));
    CHECK(finished.errors().empty());
    CHECK(out == std::vector<float>(kRanks, kRanks));
  }
}

TEST_CASE("independent calls arrive in any order") {
  Prepare();
  for (int round = 0; round < 5; ++round) IndependentCalls(round);
}

TEST_CASE("independent calls arrive in any order, many rounds [full]") {
  Prepare();
  for (int round = 5; round < 60; ++round) IndependentCalls(round);
}

TEST_CASE("continuations wait for each other") {
  Prepare();
  ContinuationsThatWait(500);
}

TEST_CASE("continuations wait for each other, many rounds [full]") {
  Prepare();
  ContinuationsThatWait(6000);
}

// Every device alternates between two runs of one call site, the second half of the devices in the other order.
TEST_CASE("two runs that interleave on every device") {
  Prepare();
  constexpr int kRanks = 4;
  std::string error;
  const auto site = Meeting::Make(Spec(Collective::kAllReduce, kRanks, kRanks, "psum"), &error);
  int32_t in[kRanks][2][3], out[kRanks][2][3];
  Counter counter;
  for (int rank = 0; rank < kRanks; ++rank) {
    for (int iteration = 0; iteration < 3; ++iteration) {
      for (int i = 0; i < 2; ++i) {
        const int which = rank < 2 ? i : 1 - i;
        in[rank][which][iteration] = rank + 100 * which + 10000 * iteration;
        Arrival arrival;
        arrival.run = 3000 + which;
        arrival.rank = rank;
        arrival.input = reinterpret_cast<const char*>(&in[rank][which][iteration]);
        arrival.output = reinterpret_cast<char*>(&out[rank][which][iteration]);
        arrival.dtype = DType::kS32;
        arrival.input_count = arrival.output_count = 1;
        site->Arrive(arrival, std::make_unique<CountCompletion>(counter));
      }
    }
  }
  CHECK(counter.WaitFor(kRanks * 2 * 3));
  for (const auto& runs : out) {
    for (int which = 0; which < 2; ++which) {
      for (int iteration = 0; iteration < 3; ++iteration) {
        CHECK(runs[which][iteration] == 6 + kRanks * (100 * which + 10000 * iteration));
      }
    }
  }
}

TEST_CASE("late devices are named, the run is refused, the next one works") {
  Prepare();
  Meeting::SetLimits({0.3, 30});
  std::string error;
  const auto late = Meeting::Make(Spec(Collective::kAllReduce, 4, 4, "psum"), &error);
  const auto other = Meeting::Make(Spec(Collective::kAllReduce, 4, 4, "pmax"), &error);
  std::vector<float> in(10, 1), out(10);
  const auto arrive = [&](Meeting& meeting, int64_t run, int64_t rank, Counter& counter) {
    Arrival arrival;
    arrival.run = run;
    arrival.rank = rank;
    arrival.input = reinterpret_cast<const char*>(&in[rank]);
    arrival.output = reinterpret_cast<char*>(&out[rank]);
    arrival.input_count = arrival.output_count = 1;
    meeting.Arrive(arrival, std::make_unique<CountCompletion>(counter));
  };
  Meeting::SetLimits({60, 60});
  Counter patient;  // a run that waits for longer
  for (const int64_t rank : {0, 1, 2}) arrive(*other, 999, rank, patient);
  Meeting::SetLimits({0.3, 60});
  Counter counter;
  arrive(*late, 1000, 0, counter);
  arrive(*late, 1000, 3, counter);
  arrive(*other, 1000, 1, counter);  // went on to another call of the same run: told as well
  CHECK(counter.WaitFor(3));
  const auto errors = counter.errors();
  CHECK(errors.size() == 3);
  for (const auto& message : errors) {
    CHECK(message.find("psum at test_meeting.cc") != std::string::npos);
    CHECK(message.find("ranks [1, 2] did not arrive within 0.3 s") != std::string::npos);
  }
  Meeting::SetLimits({60, 60});
  Counter straggler;
  arrive(*late, 1000, 2, straggler);  // the failed run refuses it at once, and gives the first reason
  Counter stranger;
  arrive(*late, 1000, 9, stranger);
  CHECK(stranger.count() == 1 && stranger.errors()[0].find("rank 9 is in no group") != std::string::npos);
  arrive(*other, 1000, 0, straggler);
  CHECK(straggler.count() == 2);
  for (const auto& message : straggler.errors()) CHECK(message == errors[0]);
  CHECK(patient.count() == 0);  // the failure was of the one run
  arrive(*other, 999, 3, patient);
  CHECK(patient.WaitFor(4) && patient.errors().empty());
  Counter next;
  for (int64_t rank = 0; rank < 4; ++rank) arrive(*late, 1001, rank, next);  // the next run works
  CHECK(next.WaitFor(4));
  CHECK(next.errors().empty());
  CHECK(out[0] == 4 && out[3] == 4);
}

TEST_CASE("ranks that disagree see both sides") {
  Prepare();
  std::string error;
  const auto site = Meeting::Make(Spec(Collective::kAllReduce, 2, 2, "psum"), &error);
  std::vector<float> in(8, 1), out(8);
  Counter counter;
  for (int64_t rank = 0; rank < 2; ++rank) {
    Arrival arrival;
    arrival.run = 2000;
    arrival.rank = rank;
    arrival.input = reinterpret_cast<const char*>(in.data());
    arrival.output = reinterpret_cast<char*>(out.data());
    arrival.input_count = arrival.output_count = rank == 0 ? 8 : 4;
    site->Arrive(arrival, std::make_unique<CountCompletion>(counter));
  }
  CHECK(counter.WaitFor(2));
  const auto errors = counter.errors();
  CHECK(errors.size() == 2);
  for (const auto& message : errors) {
    CHECK(message.find("rank 1 brings 4 -> 4 elements of float32, rank 0 8 -> 8 ") != std::string::npos);
  }
  Counter types;
  for (int64_t rank = 0; rank < 2; ++rank) {
    Arrival arrival;
    arrival.run = 2001;
    arrival.rank = rank;
    arrival.input = reinterpret_cast<const char*>(in.data());
    arrival.output = reinterpret_cast<char*>(out.data());
    arrival.dtype = rank == 0 ? DType::kF32 : DType::kS32;
    arrival.input_count = arrival.output_count = 4;
    site->Arrive(arrival, std::make_unique<CountCompletion>(types));
  }
  CHECK(types.WaitFor(2) && types.errors().size() == 2);
  for (const auto& message : types.errors()) {
    CHECK(message.find("rank 1 brings 4 -> 4 elements of int32, rank 0 4 -> 4 elements of float32") !=
          std::string::npos);
  }
  CallSpec overlapping = Spec(Collective::kAllReduce, 2, 2, "psum");
  overlapping.groups = {0, 0};
  CHECK(Meeting::Make(overlapping, &error) == nullptr);
  CHECK(error.find("rank 0 is in two groups") != std::string::npos);
}

}  // namespace
}  // namespace jaxcomm
