#include "recorder/layout.h"

#include <cstddef>
#include <type_traits>

#include "common/dtype.h"

namespace jaxcomm {
namespace {

constexpr int64_t kPage = 4096;
int64_t Pages(int64_t bytes) { return (bytes + kPage - 1) / kPage * kPage; }

template <typename T>
std::string KindOf() {
  if (std::is_array_v<T>) return "s" + std::to_string(sizeof(T));
  return (std::is_same_v<T, int64_t> ? "i" : "u") + std::to_string(sizeof(T));
}

std::string Table(const char* name, int64_t offset, int64_t row_bytes, int64_t num_rows, const std::string& fields) {
  return std::string("\"") + name + "\":{\"offset\":" + std::to_string(offset) +
         ",\"row_bytes\":" + std::to_string(row_bytes) + ",\"num_rows\":" + std::to_string(num_rows) + ",\"fields\":[" +
         fields.substr(0, fields.size() - 1) + "]},";
}

#define FIELD(Type, name) \
  ("[\"" #name "\",\"" + KindOf<decltype(Type::name)>() + "\"," + std::to_string(offsetof(Type, name)) + "],")

}  // namespace

RecorderOffsets::RecorderOffsets(int64_t num_calls) {
  texts = Pages(sizeof(RecorderHeader));
  groups = texts + kMaxTextBytes;
  sites = Pages(groups + kMaxRecordedGroups * static_cast<int64_t>(sizeof(RecordedGroup)));
  errors = Pages(sites + kMaxRecordedSites * static_cast<int64_t>(sizeof(RecordedSite)));
  calls = Pages(errors + kNumRecordedErrors * static_cast<int64_t>(sizeof(RecordedError)));
  file_bytes = Pages(calls + num_calls * static_cast<int64_t>(sizeof(RecordedCall)));
}

std::string Layout(int64_t num_calls) {
  const RecorderOffsets at(num_calls);
  using H = RecorderHeader;
  using G = RecordedGroup;
  using S = RecordedSite;
  using E = RecordedError;
  using C = RecordedCall;
  std::string text = "{";
  text += Table("header", 0, sizeof(H), 1,
                FIELD(H, pid) + FIELD(H, process_start_ticks) + FIELD(H, process) + FIELD(H, num_processes) +
                    FIELD(H, started_ns) + FIELD(H, started_unix_ns) + FIELD(H, host) + FIELD(H, kernel) +
                    FIELD(H, version_text) + FIELD(H, job) + FIELD(H, node) + FIELD(H, ending) + FIELD(H, alive_ns) +
                    FIELD(H, alive_unix_ns) + FIELD(H, num_calls) + FIELD(H, num_groups) + FIELD(H, num_sites) +
                    FIELD(H, num_errors) + FIELD(H, text_bytes));
  text += Table("groups", at.groups, sizeof(G), kMaxRecordedGroups,
                FIELD(G, hash) + FIELD(G, ranks) + FIELD(G, ranks_bytes) + FIELD(G, processes) +
                    FIELD(G, processes_bytes) + FIELD(G, next_sequence));
  text += Table("sites", at.sites, sizeof(S), kMaxRecordedSites,
                FIELD(S, text) + FIELD(S, text_bytes) + FIELD(S, algorithm) + FIELD(S, algorithm_bytes) +
                    FIELD(S, identity) + FIELD(S, group) + FIELD(S, calls) + FIELD(S, failed) + FIELD(S, bytes) +
                    FIELD(S, time_ns) + FIELD(S, waiting_ns));
  text +=
      Table("errors", at.errors, sizeof(E), kNumRecordedErrors, FIELD(E, at_ns) + FIELD(E, run_id) + FIELD(E, text));
  text += Table("calls", at.calls, sizeof(C), num_calls,
                FIELD(C, number) + FIELD(C, key) + FIELD(C, run_id) + FIELD(C, iteration) + FIELD(C, sequence) +
                    FIELD(C, input_count) + FIELD(C, output_count) + FIELD(C, arrived_ns) + FIELD(C, started_ns) +
                    FIELD(C, running_ns) + FIELD(C, ended_ns) + FIELD(C, arrived_mask) + FIELD(C, site) +
                    FIELD(C, dtype) + FIELD(C, phase) + FIELD(C, waiting_rank) + FIELD(C, waiting_peer));
  text += "\"texts\":{\"offset\":" + std::to_string(at.texts) + "},\"dtypes\":{";
  for (int type = 0; type <= static_cast<int>(DType::kF8E8M0FNU); ++type) {
    text += std::string(type ? "," : "") + "\"" + Name(static_cast<DType>(type)) +
            "\":" + std::to_string(ItemBytes(static_cast<DType>(type)));
  }
  return text +
         "},\"phases\":[\"arriving\",\"entry barrier\",\"running\",\"exit "
         "barrier\",\"done\",\"failed\"],\"file_bytes\":" +
         std::to_string(at.file_bytes) + "}";
}

}  // namespace jaxcomm
