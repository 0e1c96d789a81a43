// Validate agrees with interleavings.h, which tries all orders of small plans: on mutants of all algorithms and on
// random programs. It may neither accept what is wrong nor refuse what is right.
#include <algorithm>

#include "interleavings.h"
#include "written.h"

namespace jaxcomm {
namespace {

constexpr Collective kCollectives[] = {
#define JAXCOMM_COLLECTIVE(enumerator, name, ...) Collective::enumerator,
#include "../../ffi/collectives.def"
#undef JAXCOMM_COLLECTIVE
};

class Random {
 public:
  explicit Random(uint32_t seed) : engine_(seed) {}
  int32_t Below(int64_t count) { return static_cast<int32_t>(engine_() % static_cast<uint64_t>(count)); }
  bool OneIn(int64_t count) { return Below(count) == 0; }
  std::mt19937* engine() { return &engine_; }

 private:
  std::mt19937 engine_;
};

// What Validate's words mean. Where ranks race, it follows one order, in which data may go wrong as well.
uint32_t Meaning(const std::string& fault) {
  constexpr std::pair<const char*, uint32_t> kWords[] = {
      {"waits for ever", kDeadlock},
      {"never waits for a signal", kSignalLeftOver},
      {"nothing has written", kReadsUnwritten | kRace},
      {"may not have written yet", kRace},
      {"may not have read yet", kRace},
      {"may write later", kRace},
      {"adds ", kBadSum | kRace},
      {"is never written", kWrongOutput},
      {"wrong contents", kWrongOutput},
      {"add in different orders", kOrdersDiffer},
      {"has begun", kEndsEarly},
  };
  for (const auto& [word, meaning] : kWords) {
    if (fault.find(word) != std::string::npos) return meaning;
  }
  return kIllegalStep;
}

std::string Show(const std::vector<Plan>& plans) {
  static const char* const kKinds[] = {"copy", "put", "get", "reduce", "zero", "signal", "wait"};
  const auto place = [](const Place& p) {
    return std::to_string(p.rank) + "." + "ios"[static_cast<int>(p.space)] + std::to_string(p.offset);
  };
  std::string text;
  for (const Plan& plan : plans) {
    text += "rank " + std::to_string(plan.rank) + ", scratch " + std::to_string(plan.scratch_count) + "\n";
    for (const Step& step : plan.steps) {
      text += std::string("  ") + kKinds[static_cast<int>(step.kind)] + " " + std::to_string(step.peer) + " " +
              place(step.dst) + " = " + place(step.src) + " x" + std::to_string(step.count);
      for (int32_t i = 0; step.kind == StepKind::kReduce && i < step.num_sources; ++i) {
        text += " + " + place(plan.sources[static_cast<size_t>(step.first_source + i)]);
      }
      text += "\n";
    }
  }
  return text;
}

// How many groups of plans were right, and wrong in each way.
struct Tally {
  int right = 0;
  int wrong = 0;
  uint32_t ways = 0;

  void Compare(const std::vector<Plan>& plans, const Request& request, Random* random) {
    Interleavings interleavings(plans, request);
    if (interleavings.NumStates() > Interleavings::kMaxStates) return;
    const uint32_t faults = interleavings.Faults(random->engine(), 3);
    const Status status = Validate(plans, request);
    const bool agree = status.ok() ? faults == 0 : (Meaning(status.message()) & faults) != 0;
    if (!agree) {
      std::fprintf(stderr, "%s: Validate: \"%s\", all orders: faults %x\n%s", Name(request.collective),
                   status.message().c_str(), faults, Show(plans).c_str());
    }
    CHECK(agree);
    ++(status.ok() ? right : wrong);
    if (!status.ok()) ways |= Meaning(status.message());
  }
};

size_t AnyIndex(size_t size, Random* random) { return static_cast<size_t>(random->Below(static_cast<int64_t>(size))); }

// Spare scratch at the end of every rank's, for copies that only read.
constexpr int64_t kSpare = 3;

// Changes something about the plans; false where the change that it chose doesn't apply.
bool Mutate(std::vector<Plan>* plans, Random* random) {
  const auto n = static_cast<int32_t>(plans->size());
  Plan& plan = (*plans)[AnyIndex(plans->size(), random)];
  std::vector<Step>& steps = plan.steps;
  const auto insert = [random](std::vector<Step>& into, const Step& step) {
    into.insert(into.begin() + random->Below(static_cast<int64_t>(into.size()) + 1), step);
  };
  const auto other = [&](int32_t rank) { return (rank + 1 + random->Below(n - 1)) % n; };
  const int kind = random->Below(14);
  if (kind == 0) {  // one more pair of a signal and a wait
    const int32_t peer = other(plan.rank);
    insert(steps, Signal(peer));
    insert((*plans)[static_cast<size_t>(peer)].steps, Wait(plan.rank));
    return true;
  }
  if (steps.empty()) return false;
  const size_t i = AnyIndex(steps.size(), random), j = AnyIndex(steps.size(), random);
  Step& step = steps[i];
  const bool sync = step.kind == StepKind::kSignal || step.kind == StepKind::kWait;
  const int32_t by = random->OneIn(2) ? 1 : -1;
  switch (kind) {
    case 1:
      steps.erase(steps.begin() + static_cast<std::ptrdiff_t>(i));
      break;
    case 2:
      insert(steps, Step(step));
      break;
    case 3:
      if (i + 1 == steps.size()) return false;
      std::swap(steps[i], steps[i + 1]);
      break;
    case 4:
      std::rotate(steps.begin() + static_cast<std::ptrdiff_t>(std::min(i, j)),
                  steps.begin() + static_cast<std::ptrdiff_t>(std::min(i, j) + 1),
                  steps.begin() + static_cast<std::ptrdiff_t>(std::max(i, j) + 1));
      break;
    case 5:  // to or from another rank
      if (step.peer < 0) return false;
      step.peer = other(plan.rank);
      if (step.kind == StepKind::kPut) step.dst.rank = step.peer;
      if (step.kind == StepKind::kGet) step.src.rank = step.peer;
      break;
    case 6:
      if (sync) return false;
      step.dst.offset += by;
      break;
    case 7:
      if (sync || step.kind == StepKind::kReduce) return false;
      step.src.offset += by;
      break;
    case 8:
      if (sync) return false;
      step.count += by;
      break;
    case 9:
      if (plan.sources.empty()) return false;
      std::swap(plan.sources[AnyIndex(plan.sources.size(), random)],
                plan.sources[AnyIndex(plan.sources.size(), random)]);
      break;
    case 10:
      if (plan.sources.empty()) return false;
      plan.sources[AnyIndex(plan.sources.size(), random)].rank = random->Below(n);
      break;
    case 11:  // two steps of a rank go to each other's places
      if (i == j || sync || step.kind != steps[j].kind || step.peer != steps[j].peer) return false;
      std::swap(step.dst, steps[j].dst);
      break;
    case 12: {  // a signal and the wait for it are left out
      if (step.kind != StepKind::kSignal) return false;
      const int32_t peer = step.peer;
      std::vector<Step>& waits = (*plans)[static_cast<size_t>(peer)].steps;
      const auto wait = std::find_if(waits.begin(), waits.end(), [&](const Step& other) {
        return other.kind == StepKind::kWait && other.peer == plan.rank;
      });
      if (wait != waits.end()) waits.erase(wait);
      steps.erase(steps.begin() + static_cast<std::ptrdiff_t>(i));
      break;
    }
    default: {  // reads once more what some step reads or writes here
      Place place = step.dst.rank == plan.rank && random->OneIn(2) ? step.dst : step.src;
      if (sync || step.kind == StepKind::kReduce || place.rank != plan.rank) return false;
      insert(steps, Copy(Scratch(plan.rank, plan.scratch_count - kSpare), place, std::min(step.count, kSpare)));
    }
  }
  return true;
}

void CompareMutants(int num_mutants) {
  Random random(1);
  Tally tally;
  constexpr std::pair<int32_t, int32_t> kGeometries[] = {{1, 2}, {1, 3}, {1, 4}, {2, 1}, {3, 1}, {4, 1}, {2, 2}};
  for (Collective collective : kCollectives) {
    for (const Algorithm& algorithm : Algorithms(collective)) {
      if (algorithm.protocol != Protocol::kSteps) continue;  // the plans of another row
      for (const auto& [nodes, locals] : kGeometries) {
        for (int reach = 0; reach < 4; ++reach) {
          for (int64_t chunk : {0, 2}) {
            Request request = Ask(collective, nodes, locals, collective == Collective::kAllReduce ? 7 : 3, chunk);
            request.geometry.all_addressable = reach & 1;
            request.geometry.pull = reach & 2;
            request.root = nodes * locals - 1;
            if (!algorithm.supports(request)) continue;
            std::vector<Plan> plans = BuildAll(algorithm, request);
            for (Plan& plan : plans) plan.scratch_count += kSpare;
            tally.Compare(plans, request, &random);
            for (int i = 0; i < num_mutants; ++i) {
              std::vector<Plan> mutant = plans;
              for (int changes = 1 + random.Below(2); changes > 0;) changes -= Mutate(&mutant, &random);
              tally.Compare(mutant, request, &random);
            }
          }
        }
      }
    }
  }
  std::printf("mutants: %d right, %d wrong\n", tally.right, tally.wrong);
  CHECK(tally.ways == 2 * kEndsEarly - 1);
  CHECK(tally.right > tally.wrong / 10);
}

// Every rank copies its input to its output. Beside that, a random program works on inputs, outputs and scratch; it is
// written in the order of one run that reads nothing unwritten and gets a signal for every wait.
std::vector<Plan> RandomProgram(const Request& request, int num_steps, Random* random) {
  constexpr int64_t kScratchCount = 3;
  const int32_t n = request.geometry.num_ranks();
  std::vector<std::vector<Step>> steps(static_cast<size_t>(n));
  std::vector<int> pending(static_cast<size_t>(n * n));  // signals not waited for
  std::vector<bool> written(static_cast<size_t>(n * kScratchCount));
  for (int32_t rank = 0; rank < n; ++rank) {
    steps[static_cast<size_t>(rank)] = {Copy(Output(rank), Input(rank), request.block_count)};
  }
  const auto intra_node = [&](int32_t a, int32_t b) {
    return request.geometry.all_addressable || request.geometry.node(a) == request.geometry.node(b);
  };
  while (num_steps-- > 0) {
    const int32_t rank = random->Below(n), peer = (rank + 1 + random->Below(n - 1)) % n;
    std::vector<Step>& own = steps[static_cast<size_t>(rank)];
    int& sent = pending[static_cast<size_t>(rank * n + peer)];
    int& received = pending[static_cast<size_t>(peer * n + rank)];
    switch (random->Below(6)) {
      case 0:
      case 1:
        own.push_back(Signal(peer));
        ++sent;
        break;
      case 2:
      case 3:
        if (received == 0) break;
        own.push_back(Wait(peer));
        --received;
        break;
      default: {
        const bool get = intra_node(rank, peer) && random->OneIn(3), put = !get && random->OneIn(2);
        const int32_t count = 1 + random->Below(2);
        const Place dst = Scratch(put ? peer : rank, random->Below(kScratchCount + 1 - count));
        Place src = {get ? peer : rank, static_cast<Space>(random->Below(3)), 0};
        if (src.space == Space::kScratch) src.offset = random->Below(kScratchCount + 1 - count);
        bool readable = get || put || src.space != dst.space;
        for (int32_t k = 0; k < count && src.space == Space::kScratch; ++k) {
          readable = readable && written[static_cast<size_t>(src.rank * kScratchCount + src.offset + k)];
        }
        if (!readable) break;
        own.push_back(get ? Get(dst, src, count) : put ? Put(dst, src, count) : Copy(dst, src, count));
        for (int32_t k = 0; k < count; ++k)
          written[static_cast<size_t>(dst.rank * kScratchCount + dst.offset + k)] = true;
      }
    }
  }
  for (int32_t from = 0; from < n; ++from) {
    for (int32_t to = 0; to < n; ++to) {
      for (int i = pending[static_cast<size_t>(from * n + to)]; i > 0; --i) {
        steps[static_cast<size_t>(to)].push_back(Wait(from));
      }
    }
  }
  return Group(std::move(steps), kScratchCount);
}

void CompareRandomPrograms(int num_programs) {
  Random random(2);
  Tally tally;
  constexpr std::pair<int32_t, int32_t> kGeometries[] = {{1, 2}, {1, 3}, {2, 1}, {3, 1}, {2, 2}};
  for (int i = 0; i < num_programs; ++i) {
    const auto& [nodes, locals] = kGeometries[random.Below(5)];
    Request request = AskApart(Collective::kPermute, nodes, locals, 2);
    for (int32_t rank = 0; rank < nodes * locals; ++rank) request.source_of[static_cast<size_t>(rank)] = rank;
    tally.Compare(RandomProgram(request, 6 + random.Below(18), &random), request, &random);
  }
  std::printf("random programs: %d right, %d wrong\n", tally.right, tally.wrong);
  CHECK(tally.right > num_programs / 4 && tally.wrong > num_programs / 4);
}

TEST_CASE("mutants of all algorithms are right or wrong as all of their orders say") { CompareMutants(8); }
TEST_CASE("random programs are right or wrong as all of their orders say") { CompareRandomPrograms(6000); }
TEST_CASE("many mutants are right or wrong as all of their orders say [full]") { CompareMutants(300); }
TEST_CASE("many random programs are right or wrong as all of their orders say [full]") {
  CompareRandomPrograms(300000);
}

}  // namespace
}  // namespace jaxcomm
