// When the UCX network sends: before or after a payload has a destination, without a delay by its sleep, at its end.
#include <dlfcn.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <functional>

#include "../../ffi/transport/ucx_network.h"
#include "network_contract.h"
#include "spawned_peer.h"

namespace jaxcomm {
namespace {

MakeNetwork WithOptions(size_t eager_bytes, int64_t spin_us) {
  return [=](int process, int num_processes, uint64_t token, Receiver* receiver) {
    UcxOptions options;
    options.eager_bytes = eager_bytes;
    options.spin_us = spin_us;
    if (const char* path = std::getenv("JAXCOMM_UCX_LIBRARY")) options.library = path;
    return ValueOf(OpenUcxNetwork(options, process, num_processes, token, receiver));
  };
}

TEST_CASE("a host has RDMA if the folder of its devices exists and is not empty") {
  char folder[] = "/tmp/jaxcomm_test.XXXXXX";
  CHECK(mkdtemp(folder) != nullptr);
  CHECK(!HasRdma(folder));
  const std::string device = std::string(folder) + "/mlx5_0";
  CHECK(std::filesystem::create_directory(device));
  CHECK(HasRdma(folder));
  CHECK(std::filesystem::remove_all(folder) == 2);
  CHECK(!HasRdma(folder));
}

TEST_CASE("payloads up to the limit are sent before they have a destination, larger ones are not") {
  for (const size_t option : {size_t{4096}, size_t{0}}) {
    const size_t limit = option > 0 ? option : HasRdma() ? 65536 : 524288;
    Processes processes = JoinAll(WithOptions(option, 20), 2, TestProcess::Place::kLater);
    processes[0]->Send(1, 0, 0, limit);
    CHECK(processes[0]->WaitSent(1));  // process 1 has accepted nothing
    processes[0]->Send(1, 1, 0, limit + 1);
    CHECK(processes[1]->WaitWaiting(2));
    processes[0]->Send(1, 2, 0, 0);  // its arrival shows that process 0 has had time to finish
    CHECK(processes[1]->WaitDelivered(1));
    CHECK(processes[0]->sent() == 2);  // the first payload and the empty message
    processes[1]->AcceptAll();
    CHECK(processes[1]->WaitDelivered(3) && processes[0]->WaitSent(3));
    LeaveAll(processes);
  }
}

#ifdef UCP_WITH_HOOK
template <typename T>
T* Hooked(const char* name) {
  void* const library = dlopen(UCP_WITH_HOOK, RTLD_NOW | RTLD_LOCAL);
  CHECK(library != nullptr);
  return static_cast<T*>(dlsym(library, name));
}

std::unique_ptr<Network> WithHook(int process, int num_processes, uint64_t token, Receiver* receiver) {
  UcxOptions options;
  options.spin_us = 0;
  options.disconnect_s = 1;
  if (const char* path = std::getenv("JAXCOMM_UCX_LIBRARY")) options.library = path;
  if (process == 0) options.library = UCP_WITH_HOOK;
  return ValueOf(OpenUcxNetwork(options, process, num_processes, token, receiver));
}

TEST_CASE("over TCP, UCX assembles no message up to the limit from segments") {
  if (HasRdma()) return;
  auto* const num_assembled = Hooked<std::atomic<int>>("ucp_num_assembled");
  Processes processes = JoinAll(WithHook, 2, TestProcess::Place::kAtOnce);
  for (uint64_t index = 0; index < 4; ++index) processes[1]->Send(0, 0, index, kEagerBytes >> index);
  CHECK(processes[0]->WaitDelivered(4));
  CHECK(*num_assembled == 0);
  LeaveAll(processes);
}

TEST_CASE("a message that UCX does not complete ends with the network") {
  *Hooked<std::atomic<size_t>>("ucp_lost_bytes") = 2222;
  Processes processes = JoinAll(WithHook, 2, TestProcess::Place::kAtOnce);
  processes[0]->Send(1, 0, 0, 2222);
  processes[0]->Leave();
  CHECK(processes[0]->unsent() == 1);
  LeaveAll(processes);
}

std::atomic<TestProcess*> sender{nullptr};
std::atomic<int64_t> sent_before{0};

// Sends a message of channel 1 when that of channel 0 is sent, and the thread has no more work.
void SendWhenSent() {
  static uint64_t index = 0;
  TestProcess* const process = sender;
  if (process && process->sent() > sent_before && sender.exchange(nullptr)) process->Send(1, 1, index++, 2000);
}

// The thread sleeps for up to a second unless it is woken. Without spinning, it begins to sleep after each message.
TEST_CASE("a message that is queued right before the sleep is sent at once") {
  auto* const hook = Hooked<std::atomic<void (*)()>>("ucp_hook");
  Processes processes = JoinAll(WithHook, 2, TestProcess::Place::kAtOnce);
  *hook = SendWhenSent;
  int late = 0;
  int64_t sent = 0;
  for (uint64_t index = 0; index < 5; ++index) {
    const auto start = Clock::now();
    sent_before = sent;
    sender = processes[0].get();
    processes[0]->Send(1, 0, index, 2000);
    CHECK(processes[0]->WaitSent(sent += 2));
    late += Seconds(start) > 0.5 ? 1 : 0;
  }
  CHECK(late < 3);  // a busy machine may stop a thread for that long, but hardly three times
  CHECK(processes[1]->WaitDelivered(sent));
  LeaveAll(processes);
}
#endif

TEST_CASE("nothing is sent to a process without a connection") {
  TestProcess process(0);
  process.Join(WithOptions(0, 20)(0, 2, 1, &process));
  for (const size_t bytes : {size_t{0}, size_t{100}, size_t{5000}}) process.Send(1, 0, 0, bytes);
  CHECK(process.WaitSent(3) && process.unsent() == 3);
}

TEST_CASE("a sleeping progress thread is woken by a message, a destination, and at its end") {
  double least_s[3] = {10, 10, 10};
  for (int i = 0; i < 8 && *std::max_element(least_s, least_s + 3) > 0.5; ++i) {
    Processes processes = JoinAll(WithOptions(0, 0), 2, TestProcess::Place::kLater);
    const std::function<void()> steps[] = {[&] {
                                             processes[0]->Send(1, 0, 0, 100);
                                             CHECK(processes[1]->WaitWaiting(1));
                                           },
                                           [&] {
                                             processes[1]->AcceptAll();
                                             CHECK(processes[1]->WaitDelivered(1));
                                           },
                                           [&] { processes[0]->Leave(); }};
    for (int step = 0; step < 3; ++step) {
      std::this_thread::sleep_for(std::chrono::milliseconds(100));  // nothing else happens, so the threads sleep
      const auto start = Clock::now();
      steps[step]();
      least_s[step] = std::min(least_s[step], Seconds(start));
    }
    LeaveAll(processes);
  }
  for (const double seconds : least_s) CHECK(seconds < 0.5);
}

}  // namespace
}  // namespace jaxcomm
