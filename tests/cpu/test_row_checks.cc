// The checks of a routing, which a program may change, against lists of the rows that a rank has.
#include <set>
#include <string>
#include <vector>

#include "../../ffi/cpu/row_checks.h"
#include "participants.h"
#include "routed.h"

namespace jaxcomm {
namespace {

constexpr int64_t kRow = 3;  // elements of a row

// A call of the second of two groups of three ranks with two experts each, as rank `own` of the group makes it.
struct Call {
  Call(Collective collective, bool per_choice, int32_t own)
      : own(own), spec(Spec(collective, 6, 3, "op")), combines(collective == Collective::kCombine) {
    std::mt19937 random(3);
    routed = DrawRouting(Kind::kUniform, 3, 5, 2, 2, 1, random);
    spec.row_count = kRow;
    spec.choices = routed.choices;
    spec.num_experts = 6;
    spec.per_choice = per_choice ? 1 : 0;
    participant.table = routed.table.data();
    participant.table_count = static_cast<int64_t>(routed.table.size());
    const int64_t rows = routed.tokens * (per_choice ? routed.choices : 1);
    participant.input_count = kRow * (combines ? routed.slots : rows);
    participant.output_count = kRow * (combines ? rows : routed.slots);
    participant.index_count = routed.tokens * routed.choices;
  }
  std::string FaultOfTable() { return CheckedSlices(spec, participant, 1).status().message(); }
  std::string FaultOfRows(const std::vector<int32_t>& index, const std::vector<int32_t>& experts) {
    RankBuffers buffers;
    buffers.index = index.data();
    buffers.expert = experts.data();
    return CheckRows(spec, participant, buffers, routed.slices(), own).message();
  }

  const int32_t own;
  CallSpec spec;
  const bool combines;
  Routed routed;
  Participant participant;
};

const std::string kWhere = "jaxcomm: op at test_rendezvous.cc: ";

TEST_CASE("a table fits its call, and names the sizes of buffers that it exceeds") {
  for (const Collective collective : {Collective::kDispatch, Collective::kCombine}) {
    for (const bool per_choice : {false, true}) {
      const auto fault = [&](auto change) {
        Call call(collective, per_choice, 0);
        change(call);
        return call.FaultOfTable();
      };
      CHECK(fault([](Call&) {}).empty());
      const std::string table = kWhere + "a table of 72 integers does not fit a group of 3 ranks";
      CHECK(fault([](Call& c) { c.spec.num_experts = 5; }) == table);
      CHECK(fault([](Call& c) { c.spec.row_count = -1; }) == table);
      CHECK(fault([](Call& c) { ++c.participant.table_count; }).find("a table of 73 integers") != std::string::npos);
      CHECK(fault([](Call& c) { c.spec.row_count = 0; }).empty());
      CHECK(fault([](Call& c) { ++c.participant.index_count; }) ==
            kWhere + "a routing of 11 choices does not fit " + (per_choice ? "10" : "5") + " rows");
      // Numbers of the first expert of which rank 0 has choices: offsets among its choices and among the slots.
      const Call plain(collective, per_choice, 0);
      int64_t expert = 0;
      while (plain.routed.table[6 + expert] == 0) ++expert;
      const auto has = [&](int64_t at, const std::string& part) {
        const std::string text = fault([&](Call& c) { c.routed.table[at + expert] += 1000; });
        return text.find("from rank 3") != std::string::npos && text.find(part) != std::string::npos;
      };
      CHECK(has(0, "but the operand has 10 rows"));
      CHECK(has(12, "but the output has " + std::to_string(plain.routed.slots) + " rows"));
    }
  }
  Call slices(Collective::kAllToAllV, false, 0);
  CHECK(slices.FaultOfTable().find("but the operand has 5 rows") != std::string::npos);
  slices.participant.input_count *= 2;
  CHECK(slices.FaultOfTable().empty());
  slices.participant.table_count = 4 * 3 * 4;
  CHECK(slices.FaultOfTable() == kWhere + "a table of 48 integers does not fit a group of 3 ranks");
  slices.spec.collective = Collective::kAllReduce;  // no table is read
  CHECK(slices.FaultOfTable().empty());
}

// Tables of whole words and others: the hash reads 32 bytes at once.
template <typename T>
void CheckHashOfTable() {
  for (const size_t count : {1, 16, 32, 36, 144}) {
    std::vector<T> table(count);
    Participant participant;
    participant.table = table.data();
    participant.table_count = static_cast<int64_t>(count);
    participant.int64_table = sizeof(T) == 8;
    std::set<uint64_t> hashes = {HashOfTable(participant)};
    for (T& number : table) {
      number = 1;
      hashes.insert(HashOfTable(participant));
      number = 0;
    }
    CHECK(hashes.size() == count + 1 && hashes.count(HashOfTable(participant)) == 1);
  }
}

TEST_CASE("each number of a table is part of its hash") {
  CheckHashOfTable<int32_t>();
  CheckHashOfTable<int64_t>();
}

TEST_CASE("the choices of a rank are packed by expert") {
  const int32_t table[] = {1, 0, 1, 1, 0, 1, 1, 1};  // one rank: its choices of two experts, the second expert first
  CallSpec spec = Spec(Collective::kDispatch, 1, 1, "op");
  spec.row_count = spec.choices = 1;
  spec.num_experts = 2;
  Participant participant;
  participant.table = table;
  participant.table_count = 8;
  participant.input_count = participant.output_count = participant.index_count = 2;
  CHECK(CheckedSlices(spec, participant, 0).status().message() ==
        kWhere + "the choices of a rank are not packed by expert");
  spec.collective = Collective::kAllToAllV;
  CHECK(CheckedSlices(spec, participant, 0).ok());
}

TEST_CASE("each row of a routing is one that its rank has") {
  for (const bool per_choice : {false, true}) {
    for (int32_t own = 0; own < 3; ++own) {
      Call combine(Collective::kCombine, per_choice, own), dispatch(Collective::kDispatch, per_choice, own);
      const Routed& routed = combine.routed;
      const std::vector<int32_t>&slots = routed.slot[own], &ids = routed.ids[own];
      std::vector<std::set<int32_t>> rows(6);  // by expert
      for (size_t i = 0; i < ids.size(); ++i) rows[ids[i]].insert(slots[i]);
      const int64_t num_slots = routed.slots, num_rows = per_choice ? 10 : 5;
      for (int32_t row = -2; row < num_slots + 2; ++row) {
        std::vector<int32_t> index = slots, experts = ids;
        const size_t at = static_cast<size_t>(row + 2) % index.size();
        index[at] = row;
        for (int32_t expert = -1; expert <= 6; ++expert) {
          experts[at] = expert;
          const bool known = 0 <= expert && expert < 6;
          const std::string number = std::to_string(row), of = std::to_string(expert);
          const std::string expected =
              row < 0 ? ""  // no row
              : row >= num_slots
                  ? "row " + number + " of the routing does not exist, expected " + std::to_string(num_slots) + " rows"
              : !known                      ? "expert " + of + " of the routing does not exist, expected one of 6"
              : rows[expert].count(row) > 0 ? ""
                                            : "row " + number + " of expert " + of + " does not belong to this rank";
          CHECK(combine.FaultOfRows(index, experts) == (expected.empty() ? "" : kWhere + expected));
        }
        index.assign(slots.size(), 0);
        index[at] = row;
        CHECK(dispatch.FaultOfRows(index, ids).empty() == (0 <= row && row < num_rows));
      }
      for (const int64_t elements : {1, 0}) {  // without elements, no row moves
        combine.spec.row_count = elements;
        CHECK(combine.FaultOfRows(std::vector<int32_t>(10, 1 << 20), ids).empty() == (elements == 0));
      }
    }
  }
}

}  // namespace
}  // namespace jaxcomm
