// MakeRequest: the sizes of buffers and of contiguous fragments that fit a group. Geometries of CPUs and GPUs.
#include "../../ffi/plan/request.h"
#include "../check.h"

namespace jaxcomm {
namespace {

constexpr int64_t kRanks = 4, kBlock = 6;

struct Row {
  Collective collective;
  int64_t input, output;  // blocks
};

CallSpec SpecOf(Collective collective) {
  CallSpec spec;
  spec.collective = collective;
  spec.group_size = kRanks;
  return spec;
}

StatusOr<Request> RequestOf(const CallSpec& spec, int64_t input_count, int64_t output_count) {
  return MakeRequest(spec, GpuGeometry(kRanks, kRanks, false), input_count, output_count);
}

TEST_CASE("buffers must have the sizes of the collective") {
  for (const Row& row :
       {Row{Collective::kAllToAll, 4, 4}, Row{Collective::kAllGather, 1, 4}, Row{Collective::kAllReduce, 1, 1},
        Row{Collective::kReduceScatter, 4, 1}, Row{Collective::kPermute, 1, 1}, Row{Collective::kBroadcast, 1, 1}}) {
    const CallSpec spec = SpecOf(row.collective);
    const int64_t input = row.input * kBlock, output = row.output * kBlock;
    const Request request = ValueOf(RequestOf(spec, input, output));
    CHECK(request.block_count == kBlock && InputCount(request) == input && OutputCount(request) == output);
    CHECK(!RequestOf(spec, input + 1, output).ok() && !RequestOf(spec, input, output + 1).ok());
  }
}

TEST_CASE("buffers without blocks have any size, and a request has the root and the sources of its call") {
  for (const Row& row : {Row{Collective::kBarrier, 0, 0}, Row{Collective::kAllToAllV, 4, 4},
                         Row{Collective::kDispatch, 4, 4}, Row{Collective::kCombine, 4, 1}}) {
    const Request request = ValueOf(RequestOf(SpecOf(row.collective), 5, 7));
    CHECK(InputCount(request) == row.input && OutputCount(request) == row.output);
  }
  CallSpec spec = SpecOf(Collective::kBroadcast);
  spec.root = 2;
  CHECK(ValueOf(RequestOf(spec, kBlock, kBlock)).root == 2);
  spec = SpecOf(Collective::kPermute);
  spec.source_of = {1, -1, 0, 3};
  CHECK(ValueOf(RequestOf(spec, kBlock, kBlock)).source_of == spec.source_of);
}

TEST_CASE("the boxes of a reshard fit the buffers") {
  CallSpec spec = SpecOf(Collective::kReshard);
  spec.sources = {0, 9, 0, 0, 0, 0, 0, 0};  // rank 0 has nine elements; rank 1 wants four of them, rank 2 two
  spec.destinations = {0, 0, 2, 6, 7, 9, 0, 0};
  CHECK(ValueOf(RequestOf(spec, 9, 4)).block_count == 4);
  CHECK(RequestOf(spec, 8, 4).status().message() ==
        "buffers of 8 and 4 elements are too small for the boxes of rank 0");
  CHECK(RequestOf(spec, 9, 3).status().message() ==
        "buffers of 9 and 3 elements are too small for the boxes of rank 1");
}

TEST_CASE("geometries") {
  for (const int32_t ranks_per_node : {2, 4, 8}) {
    for (const bool multimem : {false, true}) {
      const Geometry g = GpuGeometry(8, ranks_per_node, multimem);
      CHECK(g.ranks_per_node == ranks_per_node && g.num_nodes * ranks_per_node == 8);
      CHECK(g.all_addressable == (ranks_per_node == 8) && g.pull && g.multimem == multimem && g.nvlink);
    }
    for (const Scope scope : {Scope::kProcess, Scope::kNode, Scope::kNetwork}) {
      const Geometry g = CpuGeometry(scope, 8, ranks_per_node);
      CHECK(g.ranks_per_node == ranks_per_node && g.num_nodes * ranks_per_node == 8);
      CHECK(g.all_addressable == (scope != Scope::kNetwork) && g.pull == (scope != Scope::kProcess));
      CHECK(!g.multimem && !g.nvlink);
    }
  }
}

TEST_CASE("fragments divide a block, and a request is fragmented if the operand or the result is") {
  for (const int64_t input : {0, 2, 4, 6, 12}) {
    for (const int64_t output : {0, 3, 5, 6, 24}) {
      CallSpec spec = SpecOf(Collective::kAllToAll);
      spec.input_contiguous_count = input;
      spec.output_contiguous_count = output;
      const StatusOr<Request> request = RequestOf(spec, kRanks * kBlock, kRanks * kBlock);
      CHECK(request.ok() == (input != 4 && input != 12 && output != 5 && output != 24));
      if (request.ok()) CHECK(request->fragmented == (input == 2 || output == 3));
    }
  }
}

}  // namespace
}  // namespace jaxcomm
