#include "cpu/progress_thread.h"

#include <sched.h>

#include <algorithm>
#include <chrono>
#include <thread>
#include <utility>

#include "cpu/hand_over.h"

namespace jaxcomm {
namespace {

using Clock = InterProcessCall::Clock;

constexpr auto kIdleSpin = std::chrono::microseconds(100);      // polls before it sleeps: see UcxOptions::spin_us
constexpr auto kCheckEvery = std::chrono::milliseconds(20);     // deadlines and liveness of peers
constexpr auto kReclaimEvery = std::chrono::milliseconds(100);  // while no call is in flight

}  // namespace

ProgressThread::ProgressThread(Node& node) : node_(node) {
  std::thread([this] { Run(); }).detach();
}

void ProgressThread::Add(std::shared_ptr<InterProcessCall> call) {
  AtHandOver(HandOver::kAddToProgress);
  {
    std::lock_guard<std::mutex> lock(mutex_);
    added_.push_back(std::move(call));
  }
  changed_.notify_one();
  node_.control_segment().RingDoorbell();
}

void ProgressThread::FailRun(int64_t run_id, const Status& error) {
  std::vector<std::shared_ptr<InterProcessCall>> calls;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    for (const auto* list : {&added_, &calls_}) {
      for (const auto& call : *list) {
        if (call->run_id() == run_id) calls.push_back(call);
      }
    }
  }
  for (const auto& call : calls) call->Fail(error);
}

void ProgressThread::Stop() {
  std::unique_lock<std::mutex> lock(mutex_);
  stop_ = true;
  changed_.notify_one();
  node_.control_segment().RingDoorbell();
  while (!stopped_) changed_.wait(lock);
}

void ProgressThread::Run() {
  std::vector<std::shared_ptr<InterProcessCall>> calls;
  std::vector<std::shared_ptr<InterProcessCall>> failed;  // their slots and blocks are not free yet
  Clock::time_point last_moved = Clock::now();
  Clock::time_point next_check = last_moved + kCheckEvery;
  bool announced = false;  // PrepareToSleep has been called; one more pass follows before Sleep
  uint32_t doorbell = 0;
  for (;;) {
    {
      std::unique_lock<std::mutex> lock(mutex_);
      while (calls.empty() && added_.empty() && !stop_) {
        calls_.clear();                       // they may keep a program alive that has been dropped
        node_.control_segment().StayAwake();  // no peer needs to ring while no call is in flight
        announced = false;
        if (failed.empty()) {
          changed_.wait(lock);
        } else if (changed_.wait_for(lock, kReclaimEvery) == std::cv_status::timeout) {
          break;
        }
        last_moved = Clock::now();
      }
      if (stop_) break;
      for (auto& call : added_) calls.push_back(std::move(call));
      added_.clear();
      calls_ = calls;
    }
    bool moved = false;
    const auto over = [&](const std::shared_ptr<InterProcessCall>& call) {
      InterProcessCall::AdvanceResult result;
      while ((result = call->Advance()) == InterProcessCall::AdvanceResult::kMoved) moved = true;
      return result == InterProcessCall::AdvanceResult::kOver || call->over();
    };
    for (auto& call : calls) {
      if (!over(call)) continue;
      moved = true;
      if (call->failed()) failed.push_back(std::move(call));
      call = nullptr;
    }
    calls.erase(std::remove(calls.begin(), calls.end(), nullptr), calls.end());

    const Clock::time_point now = Clock::now();
    if (now >= next_check) {
      next_check = now + kCheckEvery;
      node_.CheckAlive();
      for (const auto& call : calls) call->Check(now);
      failed.erase(std::remove_if(failed.begin(), failed.end(), [](const auto& call) { return call->Reclaim(); }),
                   failed.end());
    }
    if (moved) {
      last_moved = now;
      continue;
    }
    if (now - last_moved < kIdleSpin) {
      sched_yield();
    } else if (!announced) {
      doorbell = node_.control_segment().PrepareToSleep();
      announced = true;
    } else {
      node_.control_segment().Sleep(doorbell, std::chrono::nanoseconds(kCheckEvery).count());
      announced = false;
    }
  }
  std::lock_guard<std::mutex> lock(mutex_);
  stopped_ = true;
  changed_.notify_all();
}

}  // namespace jaxcomm
