// dispatch and combine on ranks of one or several nodes, against rows that are moved and added one by one. Nodes have
// executions of their own, and a network that counts bytes.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <set>
#include <utility>
#include <vector>

#include "../../ffi/cpu/planner.h"
#include "../../ffi/transport/node.h"
#include "participants.h"
#include "routed.h"

namespace jaxcomm {
namespace {

using Rows = std::vector<std::vector<float>>;  // by rank

int64_t row_count = 5;  // elements of a row; set by the test cases
int64_t RowBytes() { return row_count * 4; }

// Executes a collective with one Execution per node. The network delivers at once, and counts.
class NodesOfRanks : public RemoteTransport {
 public:
  NodesOfRanks(std::shared_ptr<const Program> program, const Routed& c)
      : program_(std::move(program)), c_(c), buffers_(c.n), signals_(c.n) {
    for (int32_t r = 0; r < c.n; ++r) {
      signals_[r] = std::make_unique<std::atomic<uint32_t>[]>(c.n);
      scratch_.emplace_back(program_->scratch_bytes(r), 77);
      buffers_[r].scratch = scratch_[r].data();
      buffers_[r].signals = signals_[r].get();
      buffers_[r].expert = c.ids[r].data();
    }
  }

  void Run(const Rows& inputs, Rows& outputs, const Rows* weights, const std::vector<std::vector<int32_t>>& index) {
    const int32_t per_node = one_host ? c_.n : program_->tokens.ranks_per_node, per_process = per_node / processes;
    for (int32_t r = 0; r < c_.n; ++r) {
      buffers_[r].input = reinterpret_cast<const char*>(inputs[r].data());
      buffers_[r].output = reinterpret_cast<char*>(outputs[r].data());
      buffers_[r].index = index[r].data();
      buffers_[r].weights = weights != nullptr ? (*weights)[r].data() : nullptr;
    }
    std::vector<std::unique_ptr<Execution>> nodes;
    for (int32_t process = 0; process < c_.n / per_process; ++process) {
      std::vector<RankBuffers> seen = buffers_;
      for (int32_t r = 0; r < c_.n; ++r) {
        if (r / per_process == process) continue;
        seen[r].local = false;
        seen[r].input_pid = getpid();
        if (r / per_node == process / processes) continue;
        seen[r] = RankBuffers();
        seen[r].local = false;
        seen[r].remote = this;
      }
      nodes.push_back(std::make_unique<Execution>(program_, std::move(seen), c_.slices()));
    }
    std::set<size_t> finished;
    for (int round = 0; round < 100 && finished.size() < nodes.size(); ++round) {
      for (size_t node = 0; node < nodes.size(); ++node) {
        if (finished.count(node) == 0 && nodes[node]->Work()) finished.insert(node);
      }
    }
    CHECK(finished.size() == nodes.size());
  }

  void PutInput(const Place&, const char*, int64_t) override { std::abort(); }
  void Put(const Place& to, std::unique_ptr<char[]> data, int64_t count) override {
    const int64_t offset = to.offset * 4, bytes = count * 4;
    CHECK(bytes > 0 && offset >= 0);
    const int64_t size =
        to.space == Space::kScratch ? program_->scratch_bytes(to.rank) : program_->output.block_count * 4;
    CHECK(offset + bytes <= size);
    std::memcpy((to.space == Space::kScratch ? buffers_[to.rank].scratch : buffers_[to.rank].output) + offset,
                data.get(), bytes);
    sent_bytes += bytes;
    ++messages;
  }
  void Signal(int32_t from, int32_t to) override { signals_[to][from].fetch_add(1); }

  bool one_host = false;  // nodes are declared: messages are written in place
  int32_t processes = 1;  // of a node or of the host, which read each other's inputs
  int64_t sent_bytes = 0, messages = 0;

 private:
  const std::shared_ptr<const Program> program_;
  const Routed& c_;
  std::vector<RankBuffers> buffers_;
  std::vector<std::unique_ptr<std::atomic<uint32_t>[]>> signals_;
  std::vector<std::vector<char>> scratch_;
};

struct Setup {
  int32_t nodes = 1, locals = 1;
  bool pull = true, home = false, per_choice = false, weighted = false;
  bool stream = false;
  bool one_host = false;  // all ranks read from each other, whatever nodes the mesh declares
  int32_t processes = 1;  // of a node, or of the host
  const char* algorithm = "direct";

  bool hierarchical() const { return std::strcmp(algorithm, "hierarchical") == 0; }
  // The row of choice i of a rank.
  int64_t RowOf(const Routed& c, size_t i) const { return static_cast<int64_t>(i) / (per_choice ? 1 : c.choices); }
};

std::shared_ptr<const Program> ProgramOf(Collective collective, const Setup& setup, const Routed& c) {
  CallSpec spec = Spec(collective, c.n, c.n, "op");
  spec.algorithm = setup.algorithm;
  spec.ranks_per_node = setup.locals;
  spec.row_count = row_count;
  spec.choices = c.choices;
  spec.num_experts = c.n * c.experts_per_rank;
  spec.per_choice = setup.per_choice;
  spec.home = setup.home;
  spec.weighted = setup.weighted;
  NodeResources resources;
  resources.scope = setup.nodes > 1 && !setup.one_host ? Scope::kNetwork : setup.pull ? Scope::kNode : Scope::kProcess;
  int64_t input = c.tokens * (setup.per_choice ? c.choices : 1) * row_count, output = c.slots * row_count;
  if (collective == Collective::kCombine) std::swap(input, output);
  const auto made = ValueOf(MakeProgram(spec, CostParams::Current(), resources, DType::kF32, input, output));
  auto program = std::make_shared<Program>(*made);
  program->stream = setup.stream;
  return program;
}

// By source rank and other node: its entries there, and the different rows (or tokens) among them.
struct Crossing {
  int64_t entries = 0, rows = 0;
};
std::vector<Crossing> Crossings(const Routed& c, const Setup& setup, const std::vector<std::vector<int32_t>>& index) {
  std::vector<Crossing> all;
  for (int32_t r = 0; r < c.n; ++r) {
    for (int32_t node = 0; node < setup.nodes; ++node) {
      if (node == r / setup.locals) continue;
      Crossing crossing;
      std::set<int64_t> rows;
      for (size_t i = 0; i < c.ids[r].size(); ++i) {
        if (c.ids[r][i] < 0 || c.RankOf(c.ids[r][i]) / setup.locals != node) continue;
        ++crossing.entries;
        if (index[r][i] >= 0) rows.insert(setup.RowOf(c, i));
      }
      crossing.rows = static_cast<int64_t>(rows.size());
      all.push_back(crossing);
    }
  }
  return all;
}

int64_t Aligned(int64_t bytes) { return (bytes + 63) / 64 * 64; }

Rows Draw(int32_t n, int64_t count, std::mt19937& random) {
  Rows rows(n, std::vector<float>(count));
  for (auto& row : rows) {
    for (float& x : row) x = static_cast<float>(static_cast<int>(random() % 19) - 9);
  }
  return rows;
}

// Of a result: pages in memory, without the huge pages at both ends.
int64_t ResidentPages(const std::vector<float>& result) {
  constexpr uintptr_t kHugePage = 2 << 20, kPage = 4096;
  const auto begin = (reinterpret_cast<uintptr_t>(result.data()) / kHugePage + 1) * kHugePage;
  const uintptr_t end = reinterpret_cast<uintptr_t>(result.data() + result.size()) / kHugePage * kHugePage;
  std::vector<unsigned char> resident((end - begin) / kPage);
  CHECK(mincore(reinterpret_cast<void*>(begin), end - begin, resident.data()) == 0);
  return std::count_if(resident.begin(), resident.end(), [](unsigned char page) { return (page & 1) != 0; });
}

// Runs the collective, and counts what crosses between nodes.
void CheckRun(Collective collective, const Routed& c, const Setup& setup, const Rows& inputs, const Rows& expected,
              const Rows* weights, const std::vector<std::vector<int32_t>>& index) {
  NodesOfRanks machine(ProgramOf(collective, setup, c), c);
  machine.one_host = setup.one_host;
  machine.processes = setup.processes;
  Rows got = expected;
  for (auto& rows : got) std::fill(rows.begin(), rows.end(), -77.f);
  machine.Run(inputs, got, weights, index);
  constexpr size_t kReused = (32 << 20) / sizeof(float);  // the memory of results that malloc reuses
  if (got.back().size() >= kReused) CHECK((ResidentPages(got.back()) == 0) == (got.back().size() > kReused));
  CHECK(got == expected);
  CHECK(!setup.one_host || machine.messages == 0);
  if (setup.one_host) return;
  int64_t bytes = 0, messages = 0;
  for (const Crossing& crossing : Crossings(c, setup, index)) {
    const int64_t per_entry = Aligned(4 * crossing.entries) * (weights != nullptr ? 2 : 1);
    bytes += setup.hierarchical() ? crossing.rows * RowBytes() + per_entry : crossing.entries * RowBytes();
    messages += crossing.entries > 0;
  }
  CHECK(machine.sent_bytes == bytes);
  // A direct dispatch sends one per group of rows that are contiguous at the receiver.
  if (setup.hierarchical() && collective == Collective::kDispatch) CHECK(machine.messages == messages);
}

void CheckDispatch(const Routed& c, const Setup& setup, std::mt19937& random) {
  const Rows x = Draw(c.n, c.tokens * (setup.per_choice ? c.choices : 1) * row_count, random);
  Rows expected(c.n, std::vector<float>(c.slots * row_count));
  auto index = c.order;
  for (int32_t r = 0; r < c.n; ++r) {
    for (int32_t& choice : index[r]) choice = static_cast<int32_t>(setup.RowOf(c, static_cast<size_t>(choice)));
    for (size_t i = 0; i < c.ids[r].size(); ++i) {
      if (c.ids[r][i] < 0) continue;
      const float* const row = &x[r][setup.RowOf(c, i) * row_count];
      std::copy_n(row, row_count, &expected[c.RankOf(c.ids[r][i])][c.slot[r][i] * row_count]);
    }
  }
  CheckRun(Collective::kDispatch, c, setup, x, expected, nullptr, index);
}

void CheckCombine(const Routed& c, const Setup& setup, std::mt19937& random) {
  const Rows rows = Draw(c.n, c.slots * row_count, random), weights = Draw(c.n, c.tokens * c.choices, random);
  Rows expected(c.n, std::vector<float>(c.tokens * (setup.per_choice ? c.choices : 1) * row_count));
  auto slots = c.slot;
  const bool drops = random() % 2 == 0;  // choices whose rows the table still has
  for (int32_t r = 0; r < c.n; ++r) {
    for (size_t i = 0; i < c.ids[r].size(); ++i) {
      if (drops && random() % 3 == 0) slots[r][i] = -1;
      if (slots[r][i] < 0) continue;
      for (int64_t k = 0; k < row_count; ++k) {
        const float value = rows[c.RankOf(c.ids[r][i])][c.slot[r][i] * row_count + k];
        expected[r][setup.RowOf(c, i) * row_count + k] += setup.weighted ? weights[r][i] * value : value;
      }
    }
  }
  CheckRun(Collective::kCombine, c, setup, rows, expected, setup.weighted ? &weights : nullptr, slots);
}

// Both collectives with drawn options.
void CheckAll(const Routed& c, int32_t nodes, std::mt19937& random) {
  for (int draw = 0; draw < 6; ++draw) {
    Setup setup;
    setup.nodes = nodes;
    setup.locals = c.n / nodes;
    const bool hierarchical = nodes > 1 && random() % 2;
    if (hierarchical) setup.algorithm = "hierarchical";
    setup.pull = random() % 2;
    setup.one_host = random() % 3 == 0;
    setup.per_choice = random() % 2;
    CheckDispatch(c, setup, random);
    if (hierarchical) setup.per_choice = false;
    setup.home = !hierarchical && random() % 2;
    setup.weighted = !setup.per_choice && random() % 2;
    CheckCombine(c, setup, random);
  }
}

TEST_CASE("rows reach their slots and come back") {
  std::mt19937 random(3);
  for (int k = 0; k < static_cast<int>(Kind::kNumKinds); ++k) {
    for (const auto& [n, nodes] : {std::pair(1, 1), {3, 1}, {3, 3}, {4, 2}, {6, 2}, {6, 3}, {8, 4}, {10, 5}, {16, 2}}) {
      for (const auto& [tokens, choices] : {std::pair(0, 2), {1, 1}, {7, 3}, {5, 8}}) {
        row_count = tokens == 7 && n < 10 ? 259 : 5;  // a payload with long rows is read once for several ranks
        const int64_t per_rank = 1 + static_cast<int64_t>(random() % 3);
        CheckAll(DrawRouting(static_cast<Kind>(k), n, tokens, choices, per_rank, 1 + random() % 4, random), nodes,
                 random);
      }
    }
  }
  row_count = 5;
}

// Two processes of a node, or of a host whose ranks are those of several nodes, read from each other. The rows of a
// token are neighbours for one process, or are not. Of the long rows, a rank reads more in combine than TokenSums holds
// at once: 4 MiB, or the rows of one token.
TEST_CASE("rows of other processes reach their slots and come back") {
  std::mt19937 random(7);
  struct Size {
    int64_t elements, tokens, choices;
  };
  for (const Size& size : {Size{5, 6, 3}, {259, 6, 3}, {40'000, 12, 4}, {270'000, 2, 4}}) {
    row_count = size.elements;
    const bool is_long = size.elements > 259;
    for (int k = 0; k < static_cast<int>(Kind::kNumKinds); ++k) {
      for (const auto& [n, nodes] : {std::pair(2, 1), {6, 1}, {8, 2}, {8, 4}}) {
        if (is_long && (n > 2 || (k != 0 && static_cast<Kind>(k) != Kind::kOneExpert))) continue;  // for time
        Setup setup;
        setup.nodes = nodes;
        setup.locals = n / nodes;
        setup.processes = 2;
        setup.one_host = nodes == 4;
        for (const bool flag : {false, true}) {
          setup.algorithm = nodes > 1 && !flag ? "hierarchical" : "direct";
          setup.per_choice = flag;
          setup.weighted = !flag;
          setup.stream = flag;
          const Routed c = DrawRouting(static_cast<Kind>(k), n, size.tokens, size.choices, 2, 1 + random() % 4, random);
          CheckDispatch(c, setup, random);
          CheckCombine(c, setup, random);
        }
      }
    }
  }
  row_count = 5;
}

// The check of the other process fails the call, but perhaps not before this process has begun to move rows.
TEST_CASE("numbers of rows that another process does not have are passed over") {
  std::mt19937 random(8);
  Setup setup;
  setup.locals = setup.processes = 2;
  const Routed c = DrawRouting(Kind::kOneExpert, 2, 4, 2, 1, 1, random);  // all rows go to rank 1
  NodesOfRanks machine(ProgramOf(Collective::kDispatch, setup, c), c);
  machine.processes = 2;
  const Rows x = Draw(2, c.tokens * row_count, random);
  Rows got(2, std::vector<float>(c.slots * row_count, -77));
  machine.Run(x, got, nullptr, {{-1, 1 << 30, -(1 << 30), 1 << 28, 4, 4, 4, 4}, std::vector<int32_t>(8)});
  int64_t unwritten = 0;
  for (const std::vector<float>& of_rank : got) unwritten += std::count(of_rank.begin(), of_rank.end(), -77);
  CHECK(unwritten == 8 * row_count);  // the choices of rank 0
}

// A peer that aborts may free its buffers at any time. Rank 0 reads the rows of rank 2 for both ranks of its process,
// and rank 1 those of rank 3.
TEST_CASE("a dispatch or combine of unreadable memory does not finish") {
  if (!Node::AllowSingleCopy()) return;
  std::mt19937 random(10);
  Setup setup;
  setup.locals = 4;
  const Routed c = DrawRouting(Kind::kUniform, 4, 6, 3, 2, 1, random);
  const Rows x = Draw(4, c.slots * row_count, random);
  const size_t bytes = x[0].size() * sizeof(float);
  void* const gone = mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  CHECK(gone != MAP_FAILED);
  const std::vector<int32_t> first(c.order[0].size());
  for (const auto& [collective, dead] : {std::pair(Collective::kDispatch, 2),
                                         {Collective::kDispatch, 3},
                                         {Collective::kCombine, 2},
                                         {Collective::kCombine, 3}}) {
    const auto program = ProgramOf(collective, setup, c);
    Rows got = x;
    std::vector<RankBuffers> buffers(4);
    std::vector<std::vector<std::atomic<uint32_t>>> signals;
    for (int32_t r = 0; r < 4; ++r) {
      buffers[r].input = r == dead ? static_cast<const char*>(gone) : reinterpret_cast<const char*>(x[r].data());
      buffers[r].output = reinterpret_cast<char*>(got[r].data());
      buffers[r].index = (collective == Collective::kDispatch ? first : c.slot[r]).data();
      buffers[r].expert = c.ids[r].data();
      buffers[r].local = r < 2;
      buffers[r].input_pid = r < 2 ? 0 : getpid();
      signals.emplace_back(4);
      buffers[r].signals = signals[r].data();
    }
    Execution execution(program, buffers, c.slices());
    CHECK(!execution.Work());
    CHECK(execution.unreadable_pid() == getpid());
    CHECK(!execution.Work());
  }
  munmap(gone, bytes);
}

TEST_CASE("slots without a row need no memory in results of more than 32 MiB") {
  std::mt19937 random(6);
  row_count = 1024;
  for (const int64_t more : {1, 0}) {
    Routed c = DrawRouting(Kind::kOneRank, 2, 4, 2, 1, 1, random);  // all choices are of rank 0
    c.slots = (32 << 20) / RowBytes() + more;
    CheckDispatch(c, Setup{1, 2}, random);
  }
  row_count = 5;
}

// 2 ranks, 2 tokens, 2 choices, 4 experts: all 5^8 tables of ids, of which the default size takes every 50th.
void CheckEveryRouting(int64_t stride) {
  std::mt19937 random(4);
  Routed c;
  c.n = c.tokens = c.choices = c.experts_per_rank = 2;
  c.ids.assign(2, std::vector<int32_t>(4));
  for (int64_t number = 0; number < 390'625; number += stride) {
    int64_t rest = number;
    for (auto& ids : c.ids) {
      for (int32_t& id : ids) {
        id = static_cast<int32_t>(rest % 5) - 1;
        rest /= 5;
      }
    }
    PlaceChoices(c, 1);
    Setup setup;
    setup.nodes = 2;
    setup.algorithm = "hierarchical";
    setup.weighted = number % 2 == 0;
    CheckDispatch(c, setup, random);
    CheckCombine(c, setup, random);
  }
}

TEST_CASE("a sample of all routings of two ranks") { CheckEveryRouting(53); }
TEST_CASE("all routings of two ranks [full]") { CheckEveryRouting(1); }

}  // namespace
}  // namespace jaxcomm
