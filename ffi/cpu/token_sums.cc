#include "cpu/token_sums.h"

#include <algorithm>
#include <cstring>

namespace jaxcomm {
namespace {

// Rows that are read before tokens are added. Rows of neighbouring tokens are neighbours at an expert, and the kernel
// reads them as one range. More rows leave the caches. Of 128 KiB to 4 MiB, the latter was fastest for 128 and for 4096
// tokens (AMD EPYC, 2 processes of 4 devices, rows of 1 and 4 KiB, 2026-11).
constexpr int64_t kForeignBytes = 4 << 20;

}  // namespace

TokenSums::TokenSums(const Program& program, int32_t num_nodes, int32_t own_node)
    : program_(program), tokens_(program.tokens), num_nodes_(num_nodes), own_node_(own_node) {
  if (own_node_ >= 0) part_.resize(static_cast<size_t>(tokens_.row_bytes / int64_t{sizeof(double)} + 1));
}

void TokenSums::AddRow(const char* row, int32_t pid, const char* weight) {
  if (tokens_.weight_bytes > 0) {
    weights_.resize((rows_.size() + 1) * static_cast<size_t>(tokens_.weight_bytes) / sizeof(double) + 1);
    char* const weights = reinterpret_cast<char*>(weights_.data());
    if (weight != nullptr) {
      std::memcpy(weights + rows_.size() * static_cast<size_t>(tokens_.weight_bytes), weight,
                  static_cast<size_t>(tokens_.weight_bytes));
    }
  }
  if (pid == 0) return rows_.push_back(row);
  if (!foreign_) {
    const int64_t most = std::min(kForeignBytes / std::max<int64_t>(tokens_.row_bytes, 1), tokens_.num_choices());
    max_foreign_ = std::max(tokens_.choices, most);
    foreign_.reset(new char[static_cast<size_t>(max_foreign_ * tokens_.row_bytes)]);
  }
  char* const copy = foreign_.get() + num_foreign_++ * tokens_.row_bytes;
  rows_.push_back(copy);
  reads_[pid].push_back({copy, row, tokens_.row_bytes});
}

bool TokenSums::EndToken(char* y) {
  ended_.push_back({y, begin_, static_cast<int32_t>(rows_.size())});
  begin_ = static_cast<int32_t>(rows_.size());
  if (num_foreign_ > 0 && num_foreign_ + tokens_.choices <= max_foreign_) return true;
  return Flush();
}

bool TokenSums::ReadForeign() {
  for (auto& [pid, reads] : reads_) {
    if (reads.empty()) continue;
    std::sort(reads.begin(), reads.end(), [](const RemoteRead& a, const RemoteRead& b) { return a.from < b.from; });
    if (!ReadFromProcess(pid, reads.data(), static_cast<int>(reads.size()))) {
      unreadable_pid_ = pid;
      return false;
    }
    reads.clear();
  }
  return true;
}

bool TokenSums::Flush() {
  if (!ReadForeign()) return false;
  const int32_t* ends = ends_.data();
  for (const Token& token : ended_) {
    Sum(token, ends);
    ends += num_nodes_;
  }
  ended_.clear();
  rows_.clear();
  ends_.clear();
  num_foreign_ = begin_ = 0;
  return true;
}

void TokenSums::Sum(const Token& token, const int32_t* ends) {
  const void* const* const rows = rows_.data() + token.begin;
  const char* const weights = tokens_.weight_bytes > 0
                                  ? reinterpret_cast<const char*>(weights_.data()) + token.begin * tokens_.weight_bytes
                                  : nullptr;
  const int num_rows = token.end - token.begin;
  if (own_node_ < 0) return Add(token.y, rows, weights, ends, num_nodes_, num_rows);
  const int begin = own_node_ > 0 ? ends[own_node_ - 1] : 0, end = ends[own_node_];
  parts_.assign(rows, rows + begin);
  if (end > begin) {
    const int32_t all = end - begin;
    Add(part_.data(), rows + begin, weights != nullptr ? weights + begin * tokens_.weight_bytes : nullptr, &all, 1,
        all);
    parts_.push_back(part_.data());
  }
  parts_.insert(parts_.end(), rows + end, rows + num_rows);
  const auto num_parts = static_cast<int32_t>(parts_.size());
  Add(token.y, parts_.data(), nullptr, &num_parts, 1, num_parts);
}

void TokenSums::Add(void* y, const void* const* rows, const char* weights, const int32_t* ends, int num_nodes,
                    int num_rows) {
  if (num_rows == 0) {
    std::memset(y, 0, static_cast<size_t>(tokens_.row_bytes));
  } else if (tokens_.per_choice) {
    std::memcpy(y, rows[0], static_cast<size_t>(tokens_.row_bytes));
  } else if (tokens_.combine != nullptr) {
    tokens_.combine(y, {rows, weights, ends, num_nodes}, program_.row_count);
  } else {
    program_.reduce(y, rows, num_rows, program_.row_count);
  }
}

}  // namespace jaxcomm
