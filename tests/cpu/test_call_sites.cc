// Matching of calls between two processes. Every case forks both, so this program has no threads.
#include <signal.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <functional>
#include <future>
#include <iterator>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "../../ffi/cpu/hand_over.h"
#include "../../ffi/cpu/process_context.h"
#include "../recorder/rows.h"
#include "participants.h"

namespace jaxcomm {

void (*hand_over_hook)(HandOver point) = nullptr;

namespace {

template <typename T>
T Exchange(int socket, const T& own) {
  T theirs{};
  CHECK(write(socket, &own, sizeof(own)) == sizeof(own));
  CHECK(read(socket, &theirs, sizeof(theirs)) == sizeof(theirs));  // nothing: the other has failed
  return theirs;
}

// Runs body(process, meet) in two processes that are connected; meet() returns when both have called it.
void InTwoProcesses(const std::function<void(int32_t process, const std::function<void()>& meet)>& body) {
  int sockets[2];
  CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, sockets) == 0);
  pid_t children[2];
  for (int32_t p = 0; p < 2; ++p) {
    std::fflush(nullptr);
    children[p] = fork();
    CHECK(children[p] >= 0);
    if (children[p] > 0) continue;
    prctl(PR_SET_PDEATHSIG, SIGKILL);  // also if a check ends the test
    close(sockets[1 - p]);
    CompletionPool::Get().EnsureThreads(4);
    Rendezvous::SetLimits({30, 60});
    ProcessContext& self = ProcessContext::Get();
    CHECK(self.Start(p, "node", true).ok());
    ProcessInfo other = self.info();
    other.address = Exchange(sockets[p], other.address);
    CHECK(!self.connected(1 - p) && self.Connect(1 - p, other).ok() && self.connected(1 - p));
    const auto meet = [&] { Exchange(sockets[p], 'm'); };
    meet();
    body(p, meet);
    meet();  // the other process may still read from this one
    _exit(0);
  }
  for (const int socket : sockets) close(socket);
  for (const pid_t child : children) {
    int status = 0;
    CHECK(waitpid(child, &status, 0) == child);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  }
}

// A call of ranks 0 and 1, one in each process.
std::shared_ptr<Rendezvous> PairSite(Collective collective = Collective::kAllReduce, int64_t asynchronous = 0) {
  CallSpec spec = Spec(collective, 2, 2, "psum");
  spec.processes = {0, 1};
  spec.asynchronous = asynchronous;
  return ValueOf(Rendezvous::Make(std::move(spec)));
}

std::string ErrorOf(Counter& counter) {
  CHECK(counter.WaitFor(1) && counter.errors().size() == 1);
  std::fprintf(stderr, "%s\n", counter.errors()[0].c_str());
  return counter.errors()[0];
}

// A rank's part in one call, of one s32.
struct Part {
  std::vector<int32_t> in, out;
  Counter counter;
  explicit Part(int32_t value, size_t num_outputs = 1) : in{value}, out(num_outputs, -1) {}
  void Arrive(Rendezvous& site, int64_t run_id, int64_t rank) {
    site.Arrive(MakeParticipant(run_id, rank, in.data(), out.data(), static_cast<int64_t>(in.size()),
                                static_cast<int64_t>(out.size())),
                std::make_unique<CountCompletion>(counter));
  }
  void Expect(const std::vector<int32_t>& expected) {
    CHECK(counter.WaitFor(1));
    for (const std::string& error : counter.errors()) std::fprintf(stderr, "%s\n", error.c_str());
    CHECK(counter.errors().empty() && out == expected);
  }
};

TEST_CASE("equal call sites of one program are distinguished by their order") {
  InTwoProcesses([](int32_t p, const std::function<void()>& meet) {
    if (p == 0) PairSite(), Rendezvous::EndProgram();  // an equal one of another program
    const auto first = PairSite(), second = PairSite();
    Rendezvous::EndProgram();
    Part a(1 + p), b(100 + p);
    // The processes enter them in different orders, and both calls are in flight at once.
    if (p == 0) {
      a.Arrive(*first, 100, p);
    } else {
      b.Arrive(*second, 100, p);
    }
    meet();
    if (p == 0) {
      b.Arrive(*second, 100, p);
    } else {
      a.Arrive(*first, 100, p);
    }
    a.Expect({3});
    b.Expect({201});
  });
}

TEST_CASE("runs and iterations of a call site are distinguished") {
  InTwoProcesses([](int32_t p, const std::function<void()>& meet) {
    const auto site = PairSite();
    Part parts[4] = {Part(1 + p), Part(10 + p), Part(100 + p), Part(1000 + p)};
    // Two iterations of two runs. Process 0 enters all of them before process 1 enters the first.
    const auto arrive = [&] {
      for (const int i : {0, 1}) parts[i].Arrive(*site, 500, p);
      for (const int i : {2, 3}) parts[i].Arrive(*site, 600, p);
    };
    if (p == 0) arrive();
    meet();
    if (p == 1) arrive();
    for (int i = 0; i < 4; ++i) parts[i].Expect({std::vector<int32_t>{3, 21, 201, 2001}[i]});
  });
}

TEST_CASE("groups of a call site are distinguished, each in its own order") {
  InTwoProcesses([](int32_t p, const std::function<void()>& meet) {
    Started();
    CallSpec spec = Spec(Collective::kAllGather, 4, 2, "all_gather");
    spec.groups = {0, 2, 3, 1};  // process 0 has ranks 0 and 1
    spec.processes = {0, 1, 1, 0};
    const std::shared_ptr<Rendezvous> site = ValueOf(Rendezvous::Make(std::move(spec)));
    Part low(10 + 2 * p, 2), high(11 + 2 * p, 2);  // ranks 2p and 2p + 1
    if (p == 0) {
      low.Arrive(*site, 100, 0);
      high.Arrive(*site, 100, 1);
    }
    meet();
    if (p == 1) {
      high.Arrive(*site, 100, 3);
      low.Arrive(*site, 100, 2);
    }
    low.Expect({10, 12});
    high.Expect({13, 11});
    // The recorder has both, the second one too as of its own ranks and devices of this process.
    const RecordedRows rows;
    for (const uint64_t i : {0, 1}) {
      const RecordedGroup& group = rows.group(static_cast<int64_t>(i));
      CHECK(rows.Text(group.ranks, group.ranks_bytes) == (i == 0 ? "0,2" : "3,1"));
      CHECK(rows.Text(group.processes, group.processes_bytes) == (i == 0 ? "0*1,1*1" : "1*1,0*1"));
      CHECK(rows.site(i).group == i && rows.site(i).calls == 1 && rows.site(i).bytes == 4);
      CHECK(rows.site(i).algorithm_bytes > 0 && rows.begin()[i].arrived_mask == 1);
    }
    meet();
    if (p == 1) return;
    Rendezvous::SetLimits({0.2, 60});
    Part alone(1, 2);
    alone.Arrive(*site, 101, 1);
    CHECK(ErrorOf(alone.counter).find("ranks [1] (process 0) in all_gather") != std::string::npos);
    CHECK(alone.counter.errors()[0].find("waited for ranks [3] (process 1) in no ") != std::string::npos);
  });
}

// Both get the error at once, and the next call works.
TEST_CASE("processes with different calls get an error that names both and their difference") {
  const std::string at = "are in psum at test_rendezvous.cc (1 -> 1 elements of ", long_name(230, 'x');
  const std::string usual = "test_rendezvous.cc", f32 = "[0] (process 0) " + at + "float32",
                    direct = f32 + ", direct; call ";
  const std::string s32 = "[1] (process 1) " + at + "int32", ring = "[1] (process 1) " + at + "float32, ring; call ";
  const char *const attributes = ", with different attributes or plans", *const tables = ", with different tables of ";
  const struct {
    Collective collective;
    DType type;  // of process 1; process 0 has float32
    const char* algorithms[2];
    int32_t root, max_sms;  // of process 1
    bool of_tables;         // which differ
    std::string site;
    std::vector<std::string> parts;
    const char* missing = "within";
  } cases[] = {
      {Collective::kAllReduce, DType::kF32, {"direct", "ring"}, 0, 0, false, usual, {direct, ring}},
      {Collective::kAllReduce, DType::kS32, {"", ""}, 0, 0, false, usual, {f32, s32}},
      {Collective::kBroadcast, DType::kF32, {"", ""}, 1, 0, false, "a.py", {attributes}, "tables"},
      {Collective::kBroadcast, DType::kF32, {"", ""}, 1, 0, false, long_name, {attributes}, "tables"},
      {Collective::kAllToAllV, DType::kF32, {"", ""}, 0, 0, true, "a.py", {tables}, "attributes"},
      {Collective::kAllToAllV, DType::kF32, {"", ""}, 0, 0, true, long_name, {tables}, "attributes"},
      {Collective::kAllToAllV, DType::kF32, {"", ""}, 0, 1, true, "a.py", {attributes}, "tables"},
  };
  for (const auto& one : cases) {
    InTwoProcesses([&](int32_t p, const std::function<void()>&) {
      CallSpec spec = Spec(one.collective, 2, 2, "psum");
      spec.processes = {0, 1};
      spec.site = one.site;
      spec.algorithm = one.algorithms[p];
      spec.root = p * one.root;
      spec.max_sms = p * one.max_sms;
      spec.row_count = 1;
      const std::shared_ptr<Rendezvous> site = ValueOf(Rendezvous::Make(std::move(spec))), next = PairSite();
      Rendezvous::EndProgram();
      Counter counter;
      std::vector<float> in(1), out(1);
      std::vector<int32_t> table(2 * 4 * 2);  // no rows
      table[4] = p;                           // an offset
      Participant participant = MakeParticipant(100, p, in.data(), out.data(), 1);
      if (p == 1) participant.dtype = one.type;
      if (one.of_tables) {
        participant.table = table.data();
        participant.table_count = static_cast<int64_t>(table.size());
      }
      site->Arrive(participant, std::make_unique<CountCompletion>(counter));
      const std::string message = ErrorOf(counter);
      const auto has = [&](const std::string& part) { return message.find(part) != std::string::npos; };
      CHECK(has("calls do not match: ranks [") && !has(one.missing));
      for (const std::string& part : one.parts) CHECK(has(part));
      Part part(10 + p);
      part.Arrive(*next, 101, p);
      part.Expect({21});
      const auto& keys = ProcessContext::Get().node().control_segment().keys;  // slots are used again
      while (!std::all_of(std::begin(keys), std::end(keys), [](const auto& key) { return key.load() == 0; }))
        usleep(1000);
    });
  }
}

// The processes wait in the second iteration of one call site and in the first of an equal one.
TEST_CASE("an error tells equal call sites and their iterations apart") {
  InTwoProcesses([](int32_t p, const std::function<void()>& meet) {
    const auto first = PairSite(), second = PairSite();
    Rendezvous::EndProgram();
    Part before(10 + p), part(1);
    before.Arrive(*first, 100, p);
    before.Expect({21});
    Rendezvous::SetLimits({0.5, 60});
    part.Arrive(p == 0 ? *first : *second, 100, p);
    const std::string message = ErrorOf(part.counter);
    const std::string call = "psum at test_rendezvous.cc (1 -> 1 elements of int32; call site ";
    CHECK(message.find("in " + call + "1, iteration 2) waited for ranks ") != std::string::npos ||
          message.find("in " + call + "2, iteration 1) waited for ranks ") != std::string::npos);
    CHECK(message.find(call + "1, iteration 2)") != std::string::npos);
    CHECK(message.find(call + "2, iteration 1)") != std::string::npos);
    meet();
  });
}

// Two processes wait in different calls of a run. The failure of either call fails the run.
TEST_CASE("a failure in one process ends all calls of the run in both") {
  for (const int32_t failing : {0, 1}) {
    InTwoProcesses([failing](int32_t p, const std::function<void()>& meet) {
      const auto first = PairSite(), second = PairSite();
      Rendezvous::EndProgram();
      Part part(1), next(10 + p);
      part.Arrive(p == failing ? *first : *second, 100, p);
      meet();
      CHECK(part.counter.count() == 0);
      meet();
      if (p == failing) {
        Part stranger(1);
        stranger.Arrive(*first, 100, 9);
        CHECK(stranger.counter.WaitFor(1));
      }
      CHECK(ErrorOf(part.counter).find("rank 9 is not in any group") != std::string::npos);
      next.Arrive(*first, 101, p);  // the next run works
      next.Expect({21});
    });
  }
}

// The hook of the next cases: runs `action` once, the first time that a thread comes to `point`.
HandOver point;
std::function<void()> action;
void RunAction(HandOver at) {
  if (at == point && action) std::exchange(action, nullptr)();
}

// Two orders of each pair: one thread is at a hand-over point of a call of run 100 when another one does all of its
// work. The other process does not take part, so the call ends with the failure of its run only.
TEST_CASE("a call ends with the error of its run, whatever comes between two of its steps") {
  const auto fail = [](int64_t run_id, const char* why) { RunFailures::Get().Fail(run_id, InvalidArgumentError(why)); };
  const auto failed = [](Part& part, const char* why) { return ErrorOf(part.counter) == why; };
  enum class Other { kFailure, kTwoFailures, kFailureOfAnotherRun, kNextRun };
  for (const HandOver at : {HandOver::kMatched, HandOver::kEntered, HandOver::kAddToProgress, HandOver::kCallsFailed}) {
    for (const Other other : {Other::kFailure, Other::kTwoFailures, Other::kFailureOfAnotherRun, Other::kNextRun}) {
      for (const int64_t asynchronous : {0, 1}) {
        InTwoProcesses([=](int32_t p, const std::function<void()>&) {
          Rendezvous::SetLimits({20, 60});
          const auto site = PairSite(Collective::kAllReduce, asynchronous);
          if (p == 1) return;
          Part part(1), next(1);
          std::promise<void> done;
          point = at;
          action = [&] {
            if (other == Other::kNextRun)
              next.Arrive(*site, 101, 0);
            else
              fail(other == Other::kFailureOfAnotherRun ? 99 : 100, "had enough");
            if (other == Other::kTwoFailures) fail(100, "the second error is none");
            done.set_value();
          };
          hand_over_hook = RunAction;
          part.Arrive(*site, 100, 0);
          if (at == HandOver::kCallsFailed) fail(100, "had enough");
          CHECK(done.get_future().wait_for(std::chrono::seconds(10)) == std::future_status::ready);
          if (other == Other::kFailureOfAnotherRun) fail(100, "had enough");
          if (other == Other::kNextRun) {
            CHECK(next.counter.count() == 0);
            fail(100, "had enough");
            CHECK(failed(part, "had enough") && next.counter.count() == 0);
            fail(101, "the end");
            CHECK(failed(next, "the end"));
          }
          CHECK(failed(part, "had enough"));
        });
      }
    }
  }
}

TEST_CASE("a device that arrives while its run fails, or later, gets the error of its run") {
  InTwoProcesses([](int32_t p, const std::function<void()>&) {
    if (p == 1) return;
    const auto site = ValueOf(Rendezvous::Make(Spec(Collective::kAllReduce, 3, 3, "psum")));
    Part parts[2] = {Part(1), Part(1)};
    parts[0].Arrive(*site, 100, 0);
    point = HandOver::kCallsFailed;
    action = [&] { parts[1].Arrive(*site, 100, 1); };
    hand_over_hook = RunAction;
    RunFailures::Get().Fail(100, InvalidArgumentError("had enough"));
    for (Part& part : parts) CHECK(ErrorOf(part.counter) == "had enough");
    for (int64_t run = 101; run < 120; ++run) RunFailures::Get().Fail(run, InvalidArgumentError(std::to_string(run)));
    for (int64_t run = 104; run < 120; ++run) {  // the latest 16
      Part part(1);
      part.Arrive(*site, run, 0);
      CHECK(ErrorOf(part.counter) == std::to_string(run));
    }
  });
}

// Each process waits in a run of its own, in groups that have these devices.
TEST_CASE("processes in different runs get an error if their groups have the same devices") {
  struct Case {
    std::vector<int32_t> devices[2];
    int64_t rank;  // of process 1
    bool same, numbered = false;
  };
  const std::vector<int32_t> one_pair = {1, 3}, another = {0, 2}, both = {1, 3, 0, 2};
  for (const Case& one :
       {Case{{one_pair, one_pair}, 1, true}, Case{{one_pair, one_pair}, 1, true, true},
        Case{{one_pair, another}, 1, false}, Case{{both, both}, 3, false}, Case{{{}, {}}, 1, false}}) {
    InTwoProcesses([&one](int32_t p, const std::function<void()>& meet) {
      Rendezvous::SetLimits({30, one.numbered ? 60 : 0.2});
      CallSpec spec = Spec(Collective::kAllReduce, 4, 2, "psum");
      spec.processes = {0, 1, 0, 1};
      if (one.devices[p].size() == 2) spec.groups.resize(2), spec.processes.resize(2);
      spec.devices = one.devices[p];
      spec.numbered = one.numbered;
      const auto site = ValueOf(Rendezvous::Make(std::move(spec)));
      Part part(1);
      part.Arrive(*site, 100 + p, p * one.rank);
      if (one.same && (p == 0 || !one.numbered)) {  // of two numbered calls, only the earlier one fails
        const char* const why = one.numbered ? ", a later call" : "calls do not match";
        CHECK(ErrorOf(part.counter).find(why) != std::string::npos);
      } else {
        std::this_thread::sleep_for(std::chrono::milliseconds(800));
        CHECK(part.counter.count() == 0);
      }
      meet();
      RunFailures::Get().Fail(100 + p, InvalidArgumentError("the end"));
      CHECK(part.counter.WaitFor(1));
    });
  }
}

TEST_CASE("the common resources of the processes of a group") {
  InTwoProcesses([](int32_t p, const std::function<void()>&) {
    ProcessContext& self = ProcessContext::Get();
    ProcessInfo remote = self.info();  // of another node: no memory is shared
    remote.node = "far";
    remote.num_processors = 1;
    CHECK(self.Connect(7, remote).ok());
    remote.single_copy = false;
    CHECK(self.Connect(8, remote).ok());
    bool single_copy = false;
    std::vector<int32_t> node_of;
    NodeResources resources = self.ResourcesOf({1, 0, 1}, &single_copy, &node_of);
    CHECK(resources.scope == Scope::kNode && single_copy == self.info().single_copy);
    CHECK(resources.num_processors == self.info().num_processors && (node_of == std::vector<int32_t>{0, 0, 0}));
    node_of.clear();
    resources = self.ResourcesOf({7, p, 7, 1 - p}, &single_copy, &node_of);
    CHECK(resources.scope == Scope::kNetwork && single_copy == self.info().single_copy);
    CHECK(resources.num_processors == 1 && (node_of == std::vector<int32_t>{0, 1, 0, 1}));
    node_of.clear();
    self.ResourcesOf({p, 8}, &single_copy, &node_of);
    CHECK(!single_copy);
    ProcessInfo near = self.info();  // its memory is not where it has said
    std::array<uint64_t, 2> token;
    near.address.token_address = reinterpret_cast<uint64_t>(token.data());
    for (const size_t half : {0, 1}) {
      token = near.address.token;
      ++token[half];
      CHECK(self.Connect(6, near).ok() == !near.single_copy && self.connected(6) == !near.single_copy);
    }
    near.single_copy = false;
    CHECK(self.Connect(6, near).ok());
    // A process that is not connected is named before anything runs.
    CallSpec spec = Spec(Collective::kAllReduce, 4, 2, "psum");
    spec.processes = {p, 1 - p, 9, 9};
    CHECK(Rendezvous::Make(spec).ok());  // not in a group of this process
    spec.processes = {p, 9, p, 9};
    CHECK(Rendezvous::Make(spec).status().message() == "psum: process 9 is not connected; call jaxcomm.register()");
    spec.processes = {p};
    CHECK(Rendezvous::Make(spec).status().message() ==
          "psum: attribute processes has 1 entries, expected 4, one per rank");
  });
}

TEST_CASE("a process names its own late devices, and its calls that are invalid") {
  InTwoProcesses([](int32_t p, const std::function<void()>&) {
    CallSpec spec = Spec(Collective::kAllReduce, 3, 3, "psum");
    spec.processes = {p, p, 1 - p};
    const auto site = ValueOf(Rendezvous::Make(spec));
    Part part(1), invalid(1);
    part.Arrive(*site, 100, 1);
    const auto expired = site->CheckWaits(std::chrono::steady_clock::now() + std::chrono::hours(1));
    CHECK(expired.size() == 1 && expired[0].second.message() ==
                                     "jaxcomm: psum at test_rendezvous.cc: ranks [0] did not arrive within 30 s "
                                     "(JAXCOMM_TIMEOUT_S) of the first of ranks [1]");
    RunFailures::Get().Fail(100, expired[0].second);
    CHECK(part.counter.WaitFor(1));
    spec.processes = {p, 1 - p, 1 - p};
    spec.algorithm = "no such";
    invalid.Arrive(*ValueOf(Rendezvous::Make(spec)), 101, 0);
    CHECK(ErrorOf(invalid.counter).rfind("jaxcomm: psum at test_rendezvous.cc: ", 0) == 0);
  });
}

}  // namespace
}  // namespace jaxcomm
