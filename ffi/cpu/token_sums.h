// Adds the rows of tokens. Rows that lie in other processes are read first, those of several tokens by one system call
// per process.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "cpu/executor.h"
#include "transport/node.h"

namespace jaxcomm {

class TokenSums {
 public:
  // num_nodes: the number of nodes whose rows are kept apart. own_node: every other node has at most one row for a
  // token, which is the sum of that node; -1: no row is such a sum.
  TokenSums(const Program& program, int32_t num_nodes, int32_t own_node);

  // The next row of the current token. weight: null for a sum of another node and in combines without weights.
  void AddRow(const char* row, int32_t pid, const char* weight);
  void EndNode() { ends_.push_back(static_cast<int32_t>(rows_.size()) - begin_); }
  // y = the sum of the token's rows, at the latest in Flush(). Returns false if the memory of a process could not be
  // read.
  bool EndToken(char* y);
  bool Flush();
  // The process whose memory could not be read, or 0.
  int32_t unreadable_pid() const { return unreadable_pid_; }

 private:
  struct Token {
    char* y;
    int32_t begin, end;  // rows
  };
  bool ReadForeign();
  void Sum(const Token& token, const int32_t* ends);
  void Add(void* y, const void* const* rows, const char* weights, const int32_t* ends, int num_nodes, int num_rows);

  const Program& program_;
  const TokenLayout& tokens_;
  const int32_t num_nodes_, own_node_;
  std::vector<const void*> rows_;
  std::vector<double> weights_;  // storage of weights; aligned for each type
  std::vector<int32_t> ends_;    // by token and node, from the token's first row
  std::vector<Token> ended_;
  std::unique_ptr<char[]> foreign_;  // rows of other processes
  int64_t num_foreign_ = 0, max_foreign_ = 0;
  int32_t begin_ = 0;
  std::vector<double> part_;  // storage of the sum of the own node
  std::vector<const void*> parts_;
  std::map<int32_t, std::vector<RemoteRead>> reads_;  // by process
  int32_t unreadable_pid_ = 0;
};

}  // namespace jaxcomm
