#include "cuda/runtime/recorded_calls.h"

#include <algorithm>

#include "common/hash.h"

namespace jaxcomm::cuda {
namespace {

uint64_t Load(const uint64_t& word) { return __atomic_load_n(&word, __ATOMIC_RELAXED); }

// Where the group of this GPU begins in spec.groups, whose numbers follow the order of the local GPUs if the mesh has
// not changed it. Only names of ranks depend on that.
size_t FindGroup(const CallSpec& spec, int32_t process, int32_t device, int32_t rank) {
  const auto is_own = [&](size_t slot) { return spec.processes.empty() || spec.processes[slot] == process; };
  int64_t first = INT64_MAX;
  for (size_t slot = 0; slot < spec.groups.size(); ++slot) {
    if (is_own(slot)) first = std::min(first, spec.groups[slot]);
  }
  size_t found = 0;
  for (size_t begin = 0; begin < spec.groups.size(); begin += static_cast<size_t>(spec.group_size)) {
    const size_t slot = begin + static_cast<size_t>(rank);
    if (!is_own(slot)) continue;
    found = begin;
    if (spec.groups[slot] == first + device) break;
  }
  return found;
}

}  // namespace

void RecordedCalls::Add(uint64_t call_id, const CallSpec& spec, int32_t process, int32_t device, int32_t rank,
                        DType dtype, int64_t input_count, int64_t output_count) {
  const size_t begin = FindGroup(spec, process, device, rank);
  Call call;
  call.dtype = dtype;
  call.input_count = input_count;
  call.output_count = output_count;
  call.rank = rank;
  std::vector<int32_t> processes;
  for (size_t slot = begin; slot < begin + static_cast<size_t>(spec.group_size); ++slot) {
    call.ranks.push_back(slot < spec.groups.size() ? spec.groups[slot] : static_cast<int64_t>(slot));
    processes.push_back(slot < spec.processes.size() ? spec.processes[slot] : process);
  }
  uint64_t group = static_cast<uint64_t>(spec.asynchronous);  // each lane counts its own calls
  for (const int64_t one : call.ranks) group = Mix(group, static_cast<uint64_t>(one));
  const uint64_t identity = Mix(Mix(Mix(0, spec.op), spec.site), static_cast<uint64_t>(spec.number));
  call.hash = Mix(group, identity);
  call.arrived = CallRecord::ArrivedBit(std::count(processes.begin(), processes.begin() + rank, process));
  call.site =
      Recorder::Get().AddSite(spec.op + " at " + spec.site, spec.algorithm, identity, group, call.ranks, processes);
  std::lock_guard<std::mutex> lock(mutex_);
  calls_[static_cast<uint32_t>(call_id)] = call;
}

void RecordedCalls::Remove(uint64_t call_id) {
  std::lock_guard<std::mutex> lock(mutex_);
  constexpr size_t kKept = 256;
  removed_.push_back(static_cast<uint32_t>(call_id));
  if (removed_.size() <= kKept) return;
  calls_.erase(removed_.front());
  removed_.pop_front();
}

int32_t RecordedCalls::Look(const device::Progress& progress) {
  const uint64_t begun = Load(progress.begun), waits_ns = Load(progress.waits_ns);
  const auto number = static_cast<uint32_t>(begun >> 32);
  if (number == 0) return -1;
  if (number != number_) {
    if (open_) record_.End(true, false);
    number_ = number;
    open_ = true;
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = calls_.find(static_cast<uint32_t>(begun));
    call_ = found == calls_.end() ? Call() : found->second;
    record_ = Recorder::Get().Begin(call_.site, 0, number - 1, static_cast<uint32_t>(call_.dtype), call_.input_count,
                                    call_.output_count, Recorder::Clock::now(), number);
    record_.Arrived(call_.arrived);
    record_.Started(Mix(call_.hash, number));
    record_.Running();
  }
  if (!open_) return -1;
  const bool waits = waits_ns != waits_ns_;
  waits_ns_ = waits_ns;
  const uint64_t peer = Load(progress.waits_for) >> 32;
  const bool known = waits && peer < call_.ranks.size();
  record_.Waits(known ? call_.ranks[static_cast<size_t>(call_.rank)] : -1, known ? call_.ranks[peer] : -1);
  if (waits || static_cast<uint32_t>(Load(progress.ended)) < number) return waits ? static_cast<int32_t>(peer) : -1;
  record_.End(true, false);
  open_ = false;
  return -1;
}

}  // namespace jaxcomm::cuda
