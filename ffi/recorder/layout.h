// The file of a recorder: a header, tables of texts, groups and call sites, and a ring of calls. The file describes its
// own layout (Layout()), so that readers retype nothing and read newer files.
//
// One process writes; any process may read at any time, also while the writer is stopped or after it has been killed.
// All numbers are relaxed atomics on the writer's side.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>

namespace jaxcomm {

using Number64 = std::atomic<uint64_t>;
using Number32 = std::atomic<uint32_t>;
static_assert(Number64::is_always_lock_free && sizeof(Number64) == 8, "readers see plain numbers");

// How far a call has come in this process.
enum class CallPhase : uint32_t { kArriving, kEntryBarrier, kRunning, kExitBarrier, kDone, kFailed };

constexpr int kMaxTextBytes = 256 << 10;
constexpr int kMaxRecordedGroups = 512;
constexpr int kMaxRecordedSites = 2048;
constexpr int kNumRecordedErrors = 16;
constexpr int kErrorBytes = 1000;
constexpr int kLayoutBytes = 4096;
constexpr uint32_t kRecorderVersion = 2;  // other meanings of known fields
constexpr size_t kCacheLine = 64;

// Times are CLOCK_MONOTONIC in ns: common to the processes of a host, and running while a process is stopped.
struct RecorderHeader {
  char magic[8] = {'j', 'a', 'x', 'c', 'o', 'm', 'm', 'R'};
  uint32_t version = kRecorderVersion;
  uint32_t header_bytes = 0;
  char layout[kLayoutBytes] = {};  // JSON
  int64_t pid = 0;
  int64_t process_start_ticks = 0;  // tells a process from a later one with the same pid
  int64_t process = 0;              // JAX's process index
  int64_t num_processes = 1;
  uint64_t started_ns = 0;
  uint64_t started_unix_ns = 0;
  char host[64] = {};
  char kernel[128] = {};  // equal in processes that see each other's process ids
  char version_text[32] = {};
  char job[64] = {};  // equal in the processes of a program
  char node[192] = {};
  char ending[64] = {};  // empty: running or killed; "exit", or the name of the uncaught exception
  Number64 alive_ns{0};  // a thread of the recorder writes the time here, ten times a second
  Number64 alive_unix_ns{0};
  Number64 num_calls{0};  // begun, in all
  Number64 num_groups{0};
  Number64 num_sites{0};
  Number64 num_errors{0};
  Number64 text_bytes{0};
};

struct alignas(kCacheLine) RecordedGroup {
  Number64 hash{0};                           // of the devices, in order: equal in all processes
  Number64 ranks{0}, ranks_bytes{0};          // in the texts, by position: "0-3,8"
  Number64 processes{0}, processes_bytes{0};  // of these ranks: "0*2,1*3"
  Number64 next_sequence{0};                  // number of calls; with a caller's numbers, that of the latest one
};
static_assert(sizeof(RecordedGroup) == kCacheLine);

// A call site in one group, with its counters. What a call reads and stores is in the first cache line.
struct alignas(kCacheLine) RecordedSite {
  Number64 group{0};  // index
  Number64 calls{0}, failed{0}, bytes{0};
  Number64 time_ns{0};     // from the first arrival to the end
  Number64 waiting_ns{0};  // of this, until all ranks had arrived
  Number64 unused[2]{};
  Number64 text{0}, text_bytes{0};            // "psum at train.py:12 (f)"
  Number64 algorithm{0}, algorithm_bytes{0};  // as requested or, from the first call on, as selected
  Number64 identity{0};                       // equal in all processes for the same call site
};
static_assert(offsetof(RecordedSite, text) == kCacheLine);

struct RecordedCall {
  Number64 number{0};  // from 1, among all calls of the process; 0: never used
  Number64 key{0};     // equal in all processes for the same call
  Number64 arrived_mask{
      0};                  // ranks of this process that have arrived: bit i is the i-th of them in the group, up to 64
  Number64 arrived_ns{0};  // the first device of the process
  Number64 started_ns{0};  // all devices of the process have arrived
  Number64 running_ns{0};  // all processes of the host have entered
  Number64 ended_ns{0};
  Number32 phase{0};
  Number32 unused{0};
  Number64 run_id{0};
  Number64 iteration{0};
  Number64 sequence{0};  // from 1, in its group
  Number64 input_count{0}, output_count{0};
  Number32 site{0};
  Number32 dtype{0};
  Number32 waiting_rank{0};  // 1 + a rank that waits while running; 0: none known
  Number32 waiting_peer{0};  // 1 + the rank that it waits for
  Number64 more_unused{0};
};
static_assert(sizeof(RecordedCall) == 2 * kCacheLine && offsetof(RecordedCall, run_id) == kCacheLine);

struct RecordedError {
  Number64 at_ns{0};
  Number64 run_id{0};
  char text[kErrorBytes] = {};
};

// The tables of a file with room for `num_calls` calls, as offsets.
struct RecorderOffsets {
  explicit RecorderOffsets(int64_t num_calls);
  int64_t texts, groups, sites, errors, calls, file_bytes;
};

// A description of all fields as JSON: per table its offset, the bytes of a row, the number of rows, and the fields as
// [name, kind, offset] with kind "u8", "u4", "i8" or "s<bytes>". Also the names of element types and phases.
std::string Layout(int64_t num_calls);

}  // namespace jaxcomm
