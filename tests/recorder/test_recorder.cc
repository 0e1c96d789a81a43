// The ring: latest calls, open calls that stay, counters, several threads, copies, and files that cannot be made.
#include <sys/stat.h>
#include <unistd.h>

#include <chrono>
#include <fstream>
#include <set>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "../../ffi/common/dtype.h"
#include "../check.h"
#include "rows.h"

namespace jaxcomm {
namespace {

constexpr int64_t kCalls = kRecordedCalls;
using Rows = RecordedRows;

CallRecord Begin(uint32_t site, int64_t iteration) {
  const CallRecord record =
      Started().Begin(site, 7, iteration, static_cast<uint32_t>(DType::kF32), 8, 16, Recorder::Clock::now());
  record.Arrived(CallRecord::ArrivedBit(1) | CallRecord::ArrivedBit(3));
  return record;
}

TEST_CASE("the folder does not exist, or a file is there already: an error, and nothing is recorded") {
  const Status failed = Recorder::Get().Start("/nowhere/process-0.ring", kCalls, {});
  CHECK(!failed.ok() && failed.message().find("/nowhere/process-0.ring: No such file") != std::string::npos);
  CHECK(!Recorder::Get().started());
  CHECK(Recorder::Get().AddSite("psum at a.py:1", "", 1, 2, {0}, {0}) == Recorder::kNoSite);
  CHECK(!Recorder::Get().Dump("/tmp/never").ok());
  const std::string path = RecorderFolder() + "/exists";
  std::ofstream(path) << "text";
  CHECK(!Recorder::Get().Start(path, kCalls, {}).ok());
  struct stat info;
  CHECK(stat(Started().path().c_str(), &info) == 0 && (info.st_mode & 0777) == 0600);
  CHECK(Layout(INT32_MAX).size() < kLayoutBytes);  // the description fits into the file
  const volatile int64_t last = 63;                // a compiler shifts by 64 as it likes
  CHECK(CallRecord::ArrivedBit(last) == uint64_t{1} << 63 && CallRecord::ArrivedBit(last + 1) == 0);
}

TEST_CASE("a call that stays open outlives the ring; the others are the latest, with numbers by group") {
  const uint32_t site = Started().AddSite("psum at a.py:1", "ring", 11, 22, {0, 1, 2, 5}, {0, 0, 1, 1});
  const CallRecord open = Begin(site, 0);
  open.Started(99);
  for (int64_t i = 1; i <= 250; ++i) {
    const CallRecord record = Begin(site, i);
    record.Started(99 + static_cast<uint64_t>(i));
    record.End(i % 5 != 0);
  }
  const Rows rows;
  std::multiset<uint64_t> sequences;
  int num_open = 0;
  for (const RecordedCall& call : rows) {
    sequences.insert(call.sequence);
    CHECK(call.arrived_mask == 0b1010 && call.key == 98 + call.sequence);
    const auto phase = static_cast<CallPhase>(call.phase.load());
    if (phase == CallPhase::kEntryBarrier) {
      ++num_open;
      CHECK(call.sequence == 1 && call.ended_ns == 0 && call.started_ns >= call.arrived_ns);
    } else {
      CHECK(phase == ((call.sequence - 1) % 5 != 0 ? CallPhase::kDone : CallPhase::kFailed));
      CHECK(call.ended_ns >= call.started_ns);
    }
  }
  CHECK(num_open == 1 && sequences.size() == kCalls && sequences.count(251) == 1 && sequences.count(1) == 1);
  CHECK(rows.group(0).next_sequence == 251 && rows.header().num_groups == 1 && rows.header().num_sites == 1);
  CHECK(rows.site(0).calls == 200 && rows.site(0).failed == 50 && rows.site(0).bytes == 200 * 8 * 4);
  CHECK(rows.site(0).waiting_ns <= rows.site(0).time_ns);
  CHECK(rows.Text(rows.group(0).ranks, rows.group(0).ranks_bytes) == "0-2,5");
  CHECK(rows.Text(rows.group(0).processes, rows.group(0).processes_bytes) == "0*2,1*2");
  open.End(true);
}

TEST_CASE("a handle of a call that was overwritten changes nothing, and a pause records nothing") {
  const uint32_t site = Started().AddSite("pmax at a.py:2", "", 12, 23, {0, 1}, {0, 0});
  const CallRecord old = Begin(site, 0);
  old.End(true);
  Started().Pause(true);
  Begin(site, 0).End(true);
  Started().Pause(false);
  for (int64_t i = 1; i <= kCalls; ++i) Begin(site, i).End(true);
  old.Started(1234);
  old.Waits(5, 6);
  old.End(false);
  const Rows rows;
  for (const RecordedCall& call : rows) CHECK(call.key != 1234 && call.waiting_rank == 0);
  CHECK(rows.site(1).failed == 0 && rows.site(1).calls == kCalls + 1);
}

TEST_CASE("the fast clock shows the system's time, before and after it has been compared") {
  FastClock clock;
  for (int comparisons = 0; comparisons <= 5; ++comparisons) {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    for (int i = 0; i < 100; ++i) {
      const uint64_t before = FastClock::SystemNs(), now = clock.NowNs(), after = FastClock::SystemNs();
      CHECK(now + 1'000'000 > before && now < after + 1'000'000);
    }
    clock.Compare();
  }
}

TEST_CASE("the fast clock follows ticks whose latest two rates agree, for a second") {
  FastClock clock;
  const auto compare = [&](uint64_t ticks, uint64_t ns) {
    clock.Compare(ticks, ns);
    return clock.NsAt(ticks + 300);
  };
  CHECK(compare(1'000, 50'000) == 0);
  CHECK(compare(301'000, 150'000) == 0);  // three ticks per ns
  CHECK(compare(601'000, 250'000) == 250'100);
  CHECK(compare(901'000, 350'050) == 350'150);  // a difference of 0.05 %
  CHECK(clock.NsAt(900'999) == 0);
  CHECK(clock.NsAt(901'000 + 2'990'000'000) > 990'000'000);
  CHECK(clock.NsAt(901'000 + 3'010'000'000) == 0);
  CHECK(compare(1'201'000, 450'450) == 0);  // 0.35 %
  CHECK(compare(1'501'000, 550'850) == 550'950);
  CHECK(compare(1'401'000, 650'850) == 0);  // ticks that went back
  CHECK(compare(1'701'000, 750'850) == 0);
  CHECK(compare(2'001'000, 850'850) == 850'950);
}

TEST_CASE("how far a call has come, and for whom it waits; a later call in its row begins anew") {
  const uint32_t site = Started().AddSite("psum at a.py:4", "", 14, 25, {0, 1}, {0, 1});
  const CallRecord open = Begin(site, 0);
  open.Started(7);
  const auto begin = Recorder::Clock::now();
  while (Recorder::Clock::now() - begin < std::chrono::microseconds(1)) {
  }
  open.Running();
  open.Waits(3, 5);
  const auto with_key = [](uint64_t key) {
    const Rows rows;
    for (const RecordedCall& call : rows) {
      if (call.key != key) continue;
      CHECK(call.arrived_ns > 0 && call.started_ns >= call.arrived_ns && call.running_ns >= call.started_ns);
      CHECK(call.waiting_rank == 3 + 1 && call.waiting_peer == 5 + 1 && call.input_count == 8);
      return static_cast<CallPhase>(call.phase.load());
    }
    return CallPhase::kFailed;
  };
  CHECK(with_key(7) == CallPhase::kRunning);
  open.SetPhase(CallPhase::kExitBarrier);
  CHECK(with_key(7) == CallPhase::kExitBarrier);
  open.End(true);
  for (const bool ok : {true, false}) {  // the failed one counts no time
    const CallRecord record = Begin(site, 1);
    record.Started(8);
    record.End(ok);
  }
  const Rows ended;
  uint64_t time_ns = 0, waiting_ns = 0;
  for (const RecordedCall& call : ended) {
    if (call.site != site || call.phase != static_cast<uint32_t>(CallPhase::kDone)) continue;
    time_ns += call.ended_ns - call.arrived_ns;
    waiting_ns += (call.key == 7 ? call.running_ns : call.started_ns) - call.arrived_ns;
    CHECK(call.key != 7 || call.running_ns > call.started_ns);
  }
  CHECK(ended.site(site).time_ns == time_ns && ended.site(site).waiting_ns == waiting_ns);
  for (int64_t i = 1; i <= kCalls; ++i) Begin(site, i).End(true);
  const Rows rows;
  for (const RecordedCall& call : rows) {
    CHECK(call.running_ns == 0 && call.waiting_rank == 0 && call.waiting_peer == 0);
    CHECK(call.key == 0 && call.started_ns == 0);
  }
}

TEST_CASE("the thread shows that the process lives, copies the file after an error, and creates the trigger") {
  const std::string cut(2 * sizeof(RecordedError::text), 'a');
  for (int i = 0; i < kNumRecordedErrors; ++i) Started().AddError(i, cut);
  Started().AddError(7, "why");  // in the place of the first one
  Started().Trigger();
  const std::string dump = Started().path() + ".dump", trigger = RecorderFolder() + "/trigger";
  struct stat info;
  const auto deadline = Recorder::Clock::now() + std::chrono::minutes(2);
  while (stat(dump.c_str(), &info) != 0 || stat(trigger.c_str(), &info) != 0) {
    CHECK(Recorder::Clock::now() < deadline);
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  const Rows rows;
  const auto* error = reinterpret_cast<const RecordedError*>(rows.text.data() + rows.at.errors);
  CHECK(std::string(error->text) == "why" && error->run_id == 7);
  CHECK(error->at_ns >= rows.header().started_ns && error->at_ns <= FastClock::SystemNs());
  CHECK(error[1].run_id == 1 && std::string(error[1].text) == cut.substr(0, sizeof(error->text) - 1));
  CHECK(rows.header().num_errors == kNumRecordedErrors + 1 && rows.header().pid == getpid());
  std::ifstream fields("/proc/self/stat");
  std::string field;
  for (int i = 1; i <= 22; ++i) fields >> field;
  CHECK(std::to_string(rows.header().process_start_ticks) == field);
  for (;;) {
    const Rows now;
    if (now.header().alive_ns > rows.header().alive_ns && now.header().alive_unix_ns > rows.header().alive_unix_ns)
      break;
    CHECK(Recorder::Clock::now() < deadline);
  }
}

TEST_CASE("threads record calls of their own sites at once") {
  constexpr int kThreads = 4;
  constexpr int64_t kEach = 5000;
  std::vector<uint32_t> sites;
  for (int t = 0; t < kThreads; ++t) {
    sites.push_back(Started().AddSite("psum at b.py:" + std::to_string(t), "", 100 + t, 200, {0, 1}, {0, 0}));
  }
  std::vector<std::thread> threads;
  for (const uint32_t site : sites) {
    threads.emplace_back([site] {
      for (int64_t i = 0; i < kEach; ++i) {
        const CallRecord record = Begin(site, i);
        record.Started(static_cast<uint64_t>(i) + 1);
        record.End(true);
      }
    });
  }
  for (int i = 0; i < 20; ++i) Rows();
  for (std::thread& thread : threads) thread.join();
  const Rows rows;
  std::set<uint64_t> numbers, sequences;
  for (const RecordedCall& call : rows) {
    numbers.insert(call.number);
    sequences.insert(call.sequence);
  }
  CHECK(numbers.size() == kCalls && sequences.size() == kCalls);
  for (const uint32_t site : sites) CHECK(rows.site(site).calls == kEach);
}

TEST_CASE("one call site has a row per algorithm, program and group") {
  std::set<uint32_t> sites;
  for (int i = 0; i < 8; ++i) {
    const int rank = i / 4;
    sites.insert(
        Started().AddSite("psum at d.py:1", i % 2 ? "ring" : "direct", i / 2 % 2, 30 + 270 * rank, {rank}, {0}));
  }
  CHECK(sites.size() == 8 && sites.count(Recorder::kNoSite) == 0);
  const uint32_t site = *sites.begin();
  Started().SetAlgorithm(site, "another");
  const uint64_t text_bytes = Rows().header().text_bytes;
  Started().SetAlgorithm(site, "another");
  const Recorder::Clock::time_point arrived(std::chrono::nanoseconds(5));
  Started().Begin(site, 7, 0, 0, 8, 16, arrived, 40).End(true);  // a sequence that others have chosen
  Begin(site, 1).End(true);
  const Rows rows;
  CHECK(rows.Text(rows.site(site).algorithm, rows.site(site).algorithm_bytes) == "another");
  CHECK(rows.header().text_bytes == text_bytes);
  CHECK(rows.group(static_cast<int64_t>(rows.site(site).group)).next_sequence == 41);
  for (const RecordedCall& call : rows) {
    if (call.site != site) continue;
    if (call.sequence == 40)
      CHECK(call.arrived_mask == 0 && call.arrived_ns == 5 && call.run_id == 7 && call.dtype == 0);
    if (call.sequence == 41) CHECK(call.iteration == 1 && call.output_count == 16);
  }
}

TEST_CASE("64 open calls in a row stay, and a ring full of open calls takes another one") {
  for (const auto& [num_open, num_more, num_counted] : {std::tuple(64, 200, 264u), {101, 0, 100u}}) {
    const uint32_t site = Started().AddSite("psum at e.py:" + std::to_string(num_open), "", 15, 26, {0}, {0});
    std::vector<CallRecord> open;
    for (int i = 0; i < num_open; ++i) open.push_back(Begin(site, i));
    for (int i = 0; i < num_more; ++i) Begin(site, i).End(true);
    for (const CallRecord& record : open) record.End(true);
    CHECK(Rows().site(site).calls == num_counted);
  }
}

TEST_CASE("full tables of names leave later sites out") {
  CHECK(Started().AddSite(std::string(kMaxTextBytes, 'x'), "", 1, 22, {0}, {0}) == Recorder::kNoSite);
  const auto num_groups = static_cast<int>(Rows().header().num_groups);
  for (int i = num_groups; i <= kMaxRecordedGroups; ++i) {
    const uint32_t site = Started().AddSite("psum at g.py:1", "", 1, 1000 + i, {i}, {0});
    CHECK((site == Recorder::kNoSite) == (i == kMaxRecordedGroups));
  }
  uint32_t site = 0;
  for (int i = 0; i <= kMaxRecordedSites; ++i) {
    const std::string name = "psum at c.py:" + std::to_string(i);
    site = Started().AddSite(name, "", 1, 22, {0}, {0});
    CHECK(site == Started().AddSite(name, "", 1, 22, {0}, {0}));  // compiled again
  }
  CHECK(site == Recorder::kNoSite);
  Begin(site, 0).End(true);
  Started().SetAlgorithm(site, "ring");
}

}  // namespace
}  // namespace jaxcomm
