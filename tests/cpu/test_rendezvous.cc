// Stress: many call sites, runs and iterations at once, devices in random order and with random delays; late devices.
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <future>
#include <numeric>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "../../ffi/cpu/worker_pool.h"
#include "../recorder/rows.h"
#include "participants.h"
#include "standard_error.h"

namespace jaxcomm {
namespace {

// Setup of every case: threads for all devices, and deadlines that a slow machine does not exceed.
void Prepare() {
  CompletionPool::Get().EnsureThreads(8);
  Rendezvous::SetLimits({60, 30});
}

// Devices are threads. Each arrives at every site of four runs in its own order, without waiting for earlier calls.
// Every output must belong to its own site, run and iteration.
void IndependentCalls(int round) {
  constexpr int64_t kRanks = 8;
  constexpr int kSites = 12, kRuns = 4, kIterations = 3;
  std::vector<std::shared_ptr<Rendezvous>> sites;
  std::vector<int64_t> counts;
  for (int s = 0; s < kSites; ++s) {
    const int64_t group_size = s % 3 == 2 ? 4 : kRanks;
    CallSpec spec = Spec(Collective::kAllReduce, kRanks, group_size, "psum");
    if (s % 4 == 3) {
      spec.ranks_per_node = group_size / 2;
      spec.algorithm = "hierarchical";
    }
    if (s % 4 == 1) spec.algorithm = "ring";
    spec.asynchronous = s % 2;
    sites.push_back(ValueOf(Rendezvous::Make(spec)));
    counts.push_back(s % 5 == 4 ? 40000 : 64);  // the large ones use worker threads
  }
  struct Call {
    std::vector<int32_t> input, output;
  };
  std::vector<std::vector<Call>> calls(kRanks, std::vector<Call>(kRuns * kSites * kIterations));
  // `which`: run and site, as numbers of `calls`.
  const auto value = [&](int64_t rank, int which, int iteration) {
    return static_cast<int32_t>(rank + 1000 * which + 100000 * iteration + 7 * round);
  };
  Counter counter;
  std::vector<std::thread> devices;
  for (int64_t rank = 0; rank < kRanks; ++rank) {
    devices.emplace_back([&, rank] {
      std::mt19937 random(static_cast<unsigned>(rank + 100 * round));
      for (int iteration = 0; iteration < kIterations; ++iteration) {
        std::vector<int> order(kRuns * kSites);
        std::iota(order.begin(), order.end(), 0);
        std::shuffle(order.begin(), order.end(), random);
        for (const int which : order) {
          const int s = which % kSites;
          Call& call = calls[rank][which * kIterations + iteration];
          call.input.assign(counts[s], value(rank, which, iteration));
          call.output.assign(counts[s], -1);
          sites[s]->Arrive(
              MakeParticipant(kRuns * round + which / kSites, rank, call.input.data(), call.output.data(), counts[s]),
              std::make_unique<CountCompletion>(counter));
          if (random() % 8 == 0) std::this_thread::yield();
        }
      }
    });
  }
  for (auto& device : devices) device.join();
  CHECK(counter.WaitFor(kRanks * kRuns * kSites * kIterations));
  CHECK(counter.errors().empty());
  for (int64_t rank = 0; rank < kRanks; ++rank) {
    for (int which = 0; which < kRuns * kSites; ++which) {
      const int64_t group_size = which % kSites % 3 == 2 ? 4 : kRanks;
      for (int iteration = 0; iteration < kIterations; ++iteration) {
        int32_t expected = 0;
        for (int64_t peer = rank / group_size * group_size; peer < (rank / group_size + 1) * group_size; ++peer) {
          expected += value(peer, which, iteration);
        }
        for (const int32_t out : calls[rank][which * kIterations + iteration].output) CHECK(out == expected);
      }
    }
  }
}

// Like XLA's programs: code inside a completion waits until all other devices of the round have got theirs. Quick
// rounds in between empty the queue at every possible moment.
class BlockingCompletion : public Completion {
 public:
  BlockingCompletion(Counter& inside, Counter& finished, int wait_for)
      : inside_(inside), finished_(finished), wait_for_(wait_for) {}
  void Succeed() override {
    inside_.Add(OkStatus());
    CHECK(inside_.WaitFor(wait_for_));
    finished_.Add(OkStatus());
  }
  void Fail(const Status& error) override { finished_.Add(error); }

 private:
  Counter& inside_;
  Counter& finished_;
  const int wait_for_;
};

TEST_CASE("continuations wait for each other") {
  Prepare();
  constexpr int kRanks = 8, num_rounds = 500;
  const std::shared_ptr<Rendezvous> site =
      ValueOf(Rendezvous::Make(Spec(Collective::kAllReduce, kRanks, kRanks, "psum")));
  std::vector<float> in(kRanks, 1), out(kRanks);
  for (int round = 0; round < num_rounds; ++round) {
    const bool blocking = round % 3 == 0;
    // The last participant completes its own promise inside its own call, so this promise does not wait.
    Counter inside, finished;
    for (int64_t rank = 0; rank < kRanks; ++rank) {
      Participant participant = MakeParticipant(5000 + round, rank, &in[rank], &out[rank], 1);
      const int wait_for = blocking && rank + 1 < kRanks ? kRanks : 1;
      site->Arrive(participant, std::make_unique<BlockingCompletion>(inside, finished, wait_for));
    }
    CHECK(finished.WaitFor(kRanks));
    CHECK(finished.errors().empty());
    CHECK(out == std::vector<float>(kRanks, kRanks));
  }
}

// All workers are busy, so nothing can happen before they are released.
TEST_CASE("the thread of the last rank of an asynchronous call does no work") {
  Prepare();
  std::promise<void> release;
  const std::shared_future<void> released = release.get_future().share();
  Counter busy, counter;
  const int num_workers = std::max(static_cast<int>(WorkerPool::Get().num_threads()), 1);
  for (int i = 0; i < num_workers; ++i) {
    WorkerPool::Get().SubmitOnce([&busy, released] {
      busy.Add(OkStatus());
      released.wait();
    });
  }
  CHECK(busy.WaitFor(num_workers));
  CallSpec spec = Spec(Collective::kAllReduce, 4, 4, "psum_start");
  spec.asynchronous = 1;
  using Rows = std::vector<std::vector<int32_t>>;
  const int64_t counts[] = {5, 1 << 19};  // the second is split between workers
  const Rows in = {std::vector<int32_t>(counts[0], 3), std::vector<int32_t>(counts[1], 3)};
  Rows out[2];
  const auto all_are = [&](int32_t value) {
    return std::all_of(out, out + 2,
                       [&](const Rows& rows) { return rows == Rows(4, Rows::value_type(rows[0].size(), value)); });
  };
  for (int which = 0; which < 2; ++which) {
    out[which].assign(4, std::vector<int32_t>(counts[which], -1));
    const auto site = ValueOf(Rendezvous::Make(spec));
    for (int64_t rank = 0; rank < 4; ++rank) {
      site->Arrive(MakeParticipant(6000, rank, in[which].data(), out[which][rank].data(), counts[which]),
                   std::make_unique<CountCompletion>(counter));
    }
  }
  CHECK(counter.count() == 0 && all_are(-1));
  release.set_value();
  CHECK(counter.WaitFor(8) && counter.errors().empty() && all_are(12));
}

TEST_CASE("independent calls arrive in any order") {
  Prepare();
  for (int round = 0; round < 5; ++round) IndependentCalls(round);
}

// A page of memory that blocks the first thread that touches it until the page is released.
class Gate {
 public:
  explicit Gate(size_t bytes) : bytes_(bytes) {
    page_ = static_cast<char*>(mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    CHECK(page_ != MAP_FAILED);
    current = this;
    struct sigaction action = {};
    action.sa_sigaction = OnFault;
    action.sa_flags = SA_SIGINFO;
    CHECK(sigaction(SIGSEGV, &action, &before_) == 0);
  }
  ~Gate() {
    sigaction(SIGSEGV, &before_, nullptr);
    munmap(page_, bytes_);
  }
  char* data() const { return page_; }
  bool reached() const { return reached_.load(); }
  void LetGo() { released_.store(true); }

 private:
  static void OnFault(int, siginfo_t* info, void*) {
    const char* const at = static_cast<const char*>(info->si_addr);
    if (at < current->page_ || at >= current->page_ + current->bytes_) {
      sigaction(SIGSEGV, &current->before_, nullptr);  // the signal is raised again
      return;
    }
    current->reached_.store(true);
    while (!current->released_.load()) usleep(100);
    mprotect(current->page_, current->bytes_, PROT_READ | PROT_WRITE);
  }
  static inline Gate* current = nullptr;
  const size_t bytes_;
  char* page_ = nullptr;
  struct sigaction before_ = {};
  std::atomic<bool> reached_{false}, released_{false};
};

// The first run blocks while it writes the output of a rank. The second finishes in the meantime.
TEST_CASE("concurrent runs of a call site have separate scratch") {
  Prepare();
  constexpr int64_t kRanks = 4, kCount = 64;
  const auto value = [](int64_t run_id, int64_t rank, int64_t i) {
    return static_cast<int32_t>(100'000 * run_id + 1000 * rank + i);
  };
  int64_t run_id = 7000;
  for (const char* algorithm : {"ring", "tree", "recursive_doubling", "rabenseifner", "hierarchical"}) {
    for (int64_t held = 0; held < kRanks; ++held) {
      CallSpec spec = Spec(Collective::kAllReduce, kRanks, kRanks, "psum");
      spec.algorithm = algorithm;
      if (algorithm == std::string("hierarchical")) spec.ranks_per_node = 2;
      const std::shared_ptr<Rendezvous> site = ValueOf(Rendezvous::Make(spec));
      Gate gate(kCount * sizeof(int32_t));
      std::vector<std::vector<int32_t>> in[2], out[2];
      for (auto& outputs : out) outputs.assign(kRanks, std::vector<int32_t>(kCount, -1));
      Counter counters[2];
      const auto arrive = [&](int which) {
        for (int64_t rank = 0; rank < kRanks; ++rank) {
          std::vector<int32_t>& input = in[which].emplace_back();
          for (int64_t i = 0; i < kCount; ++i) input.push_back(value(which, rank, i));
          char* const own = reinterpret_cast<char*>(out[which][rank].data());
          site->Arrive(MakeParticipant(run_id + which, rank, input.data(),
                                       which == 0 && rank == held ? gate.data() : own, kCount),
                       std::make_unique<CountCompletion>(counters[which]));
        }
      };
      std::thread first([&] { arrive(0); });
      while (!gate.reached()) std::this_thread::yield();
      arrive(1);
      CHECK(counters[1].WaitFor(kRanks) && counters[0].count() == 0);
      gate.LetGo();
      first.join();
      CHECK(counters[0].WaitFor(kRanks));
      run_id += 2;
      std::memcpy(out[0][held].data(), gate.data(), kCount * sizeof(int32_t));
      for (int which = 0; which < 2; ++which) {
        CHECK(counters[which].errors().empty());
        for (const auto& output : out[which]) {
          for (int64_t i = 0; i < kCount; ++i) {
            CHECK(output[i] == value(which, 0, i) + value(which, 1, i) + value(which, 2, i) + value(which, 3, i));
          }
        }
      }
    }
  }
}

TEST_CASE("late devices are named, their run fails, the next run works") {
  Prepare();
  Rendezvous::SetLimits({0.3, 30});
  Started();
  const std::shared_ptr<Rendezvous> late = ValueOf(Rendezvous::Make(Spec(Collective::kAllReduce, 4, 4, "psum")));
  const std::shared_ptr<Rendezvous> other = ValueOf(Rendezvous::Make(Spec(Collective::kAllReduce, 4, 4, "pmax")));
  std::vector<float> in(10, 1), out(10);
  const auto arrive = [&](Rendezvous& rendezvous, int64_t run_id, int64_t rank, Counter& counter) {
    rendezvous.Arrive(MakeParticipant(run_id, rank, &in[rank], &out[rank], 1),
                      std::make_unique<CountCompletion>(counter));
  };
  Rendezvous::SetLimits({60, 60});
  Counter patient;  // another run, with a longer timeout
  for (const int64_t rank : {0, 1, 2}) arrive(*other, 999, rank, patient);
  Rendezvous::SetLimits({0.3, 60});
  Counter counter;
  arrive(*late, 1000, 0, counter);
  arrive(*late, 1000, 3, counter);
  arrive(*other, 1000, 1, counter);  // a device in another call of the same run gets the error, too
  CHECK(counter.WaitFor(3));
  const auto errors = counter.errors();
  CHECK(errors.size() == 3);
  for (const auto& message : errors) {
    CHECK(message.find("psum at test_rendezvous.cc") != std::string::npos);
    CHECK(message.find("ranks [1, 2] did not arrive within 0.3 s (JAXCOMM_TIMEOUT_S)") != std::string::npos);
  }
  Rendezvous::SetLimits({60, 60});
  Counter straggler;
  arrive(*late, 1000, 2, straggler);  // a late device of the failed run gets the first error at once
  Counter stranger;
  arrive(*late, 1000, 9, stranger);
  CHECK(stranger.count() == 1 &&
        stranger.errors()[0] == "jaxcomm: psum at test_rendezvous.cc: rank 9 is not in any group");
  arrive(*other, 1000, 0, straggler);
  CHECK(straggler.count() == 2);
  for (const auto& message : straggler.errors()) CHECK(message == errors[0]);
  CHECK(patient.count() == 0);  // only one run failed
  arrive(*other, 999, 3, patient);
  CHECK(patient.WaitFor(4) && patient.errors().empty());
  Counter next;
  for (int64_t rank = 0; rank < 4; ++rank) arrive(*late, 1001, rank, next);  // the next run works
  CHECK(next.WaitFor(4));
  CHECK(next.errors().empty());
  CHECK(out[0] == 4 && out[3] == 4);
  // The recorder has counted one call of each site as failed, and one as done.
  const RecordedRows rows;
  for (int i = 0; i < 2; ++i) CHECK(rows.site(i).calls == 1 && rows.site(i).failed == 1);
  CHECK(rows.header().num_errors == 1);                                                          // the first of the run
  while (!std::filesystem::exists(Recorder::Get().path() + ".dump")) std::this_thread::yield();  // after the failure
}

TEST_CASE("a call site has a limit of its own, and its error names the argument") {
  Prepare();
  Rendezvous::SetLimits({60, 100});
  CallSpec spec = Spec(Collective::kAllReduce, 40, 20, "psum");
  spec.timeout_ms = 500'000;
  const std::shared_ptr<Rendezvous> site = ValueOf(Rendezvous::Make(spec));
  float in = 1, out = 0;
  Counter counter;
  const auto began = std::chrono::steady_clock::now();
  site->Arrive(MakeParticipant(3000, 39, &in, &out, 1), std::make_unique<CountCompletion>(counter));
  const std::string late =  // of the second group
      "jaxcomm: psum at test_rendezvous.cc: ranks [20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31, 32, 33, 34, 35, ... "
      "(19 in all)] did not arrive within ";
  Started();
  {
    const StandardError error;
    CHECK(site->CheckWaits(began + std::chrono::seconds(499)).empty());
    CHECK(error.text() ==
          "warning: " + late + "400 s of the first of ranks [39]; an error follows after 500 s (timeout_s)\n");
  }
  while (!std::filesystem::exists(RecorderFolder() + "/trigger")) std::this_thread::yield();
  const auto expired = site->CheckWaits(std::chrono::steady_clock::now() + std::chrono::seconds(500));
  CHECK(expired.size() == 1 && expired[0].first == 3000);
  CHECK(expired[0].second.message() == late + "500 s (timeout_s) of the first of ranks [39]");
  RunFailures::Get().Fail(3000, expired[0].second);
  CHECK(counter.WaitFor(1) && counter.errors().size() == 1);
}

TEST_CASE("ranks with different buffers get an error that names both") {
  Prepare();
  const std::shared_ptr<Rendezvous> site = ValueOf(Rendezvous::Make(Spec(Collective::kAllReduce, 2, 2, "psum")));
  std::vector<float> in(8, 1), out(8);
  const std::vector<int32_t> tables[] = {std::vector<int32_t>(16), {1}};
  enum class Differ { kInputs, kOutputs, kTypes, kTables };
  const std::string of_rank_1 = "buffers do not match: rank 1 has 4 -> 4 elements of ";
  for (const auto& [differ, expected] :
       {std::pair(Differ::kInputs, of_rank_1 + "float32, rank 0 has 8 -> 4 "),
        {Differ::kOutputs, of_rank_1 + "float32, rank 0 has 4 -> 8 "},
        {Differ::kTypes, of_rank_1 + "int32, rank 0 has 4 -> 4 elements of float32"},
        {Differ::kTables, "calls do not match: ranks 0 and 1 are in it, with different tables of slices"}}) {
    Counter counter;
    for (int64_t rank = 0; rank < 2; ++rank) {
      const auto count = [&](Differ larger) { return rank == 0 && differ == larger ? 8 : 4; };
      Participant participant = MakeParticipant(2000 + static_cast<int>(differ), rank, in.data(), out.data(),
                                                count(Differ::kInputs), count(Differ::kOutputs));
      if (differ == Differ::kTypes && rank == 1) participant.dtype = DType::kS32;
      participant.table = tables[differ == Differ::kTables ? rank : 0].data();
      participant.table_count = 1;
      site->Arrive(participant, std::make_unique<CountCompletion>(counter));
    }
    CHECK(counter.WaitFor(2) && counter.errors().size() == 2);
    for (const auto& message : counter.errors()) CHECK(message.find(expected) != std::string::npos);
  }
  CallSpec overlapping = Spec(Collective::kAllReduce, 2, 2, "psum");
  overlapping.groups = {0, 0};
  const std::string error = Rendezvous::Make(overlapping).status().message();
  CHECK(error.find("rank 0 occurs twice in the groups") != std::string::npos);
}

}  // namespace
}  // namespace jaxcomm
