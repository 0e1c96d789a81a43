// The FFI handlers of the CPU with attributes and buffers as XLA passes them. tests/ops runs each collective in XLA.
#include <string>
#include <tuple>
#include <vector>

#include "xla_cpu.h"

#define JAXCOMM_COLLECTIVE(enumerator, name, Handler, ...)            \
  extern "C" XLA_FFI_Error* Handler##Instantiate(XLA_FFI_CallFrame*); \
  extern "C" XLA_FFI_Error* Handler##Execute(XLA_FFI_CallFrame*);
#include "../../ffi/collectives.def"
#undef JAXCOMM_COLLECTIVE

namespace jaxcomm {
namespace {

using fake::Attributes;
using fake::CallSite;
using fake::XlaError;

constexpr int32_t kRanks = 4;

void Prepare(double timeout_s = 60) {
  CompletionPool::Get().EnsureThreads(kRanks);
  Rendezvous::SetLimits({timeout_s, 60});
}

// The attributes of every call site. Those of its collective sort before or after `call`.
Attributes Call(bool asynchronous = false, int64_t group_size = kRanks) {
  Attributes call, all;
  call.AddText("algorithm", "");
  if (asynchronous) call.AddScalar<int64_t>("asynchronous", XLA_FFI_DataType_S64, 1);
  call.AddScalar<int64_t>("group_size", XLA_FFI_DataType_S64, group_size);
  call.AddScalar<int64_t>("max_sms", XLA_FFI_DataType_S64, 0);
  call.AddText("op", "an_op");
  call.AddScalar<int64_t>("ranks_per_node", XLA_FFI_DataType_S64, group_size);
  call.AddText("site", "a_file.py:7");
  all.AddDictionary("call", call);
  all.AddArray<int64_t>("groups", {0, 1, 2, 3});
  return all;
}

TEST_CASE("an asynchronous call with operands to wait for") {
  Prepare();
  CallSite site;
  Attributes attributes = Call(true);
  attributes.AddScalar<int64_t>("output_contiguous_count", XLA_FFI_DataType_S64, 1);
  attributes.AddArray<int32_t>("processes", {});
  CHECK(site.Instantiate(AllGatherInstantiate, attributes).code == XLA_FFI_Error_Code_OK);
  double of_any_type = 7;
  const fake::Buffer after{XLA_FFI_DataType_F64, &of_any_type, {1}};
  int32_t ranks[kRanks] = {0, 1, 2, 3}, x[kRanks] = {5, 6, 7, 8}, y[kRanks][kRanks] = {};
  std::vector<std::unique_ptr<fake::XlaFuture>> futures;
  for (int32_t r = 0; r < kRanks; ++r) {
    const fake::Buffer rank{XLA_FFI_DataType_S32, &ranks[r], {}}, in{XLA_FFI_DataType_S32, &x[r], {1}};
    futures.push_back(
        site.Execute(AllGatherExecute, 1, {rank, in, after, after}, {{XLA_FFI_DataType_S32, y[r], {kRanks}}}));
  }
  for (auto& future : futures) CHECK(future->Wait().code == XLA_FFI_Error_Code_OK);
  for (int32_t r = 0; r < kRanks; ++r) {
    for (int32_t i = 0; i < kRanks; ++i) CHECK(y[r][i] == 5 + i && x[i] == 5 + i);
  }
}

// A rank's execution of a barrier with these operands and results.
std::unique_ptr<fake::XlaFuture> EnterBarrier(CallSite& site, int32_t& rank, std::vector<fake::Buffer> xs,
                                              const std::vector<fake::Buffer>& ys, int64_t run = 1001) {
  xs.insert(xs.begin(), {XLA_FFI_DataType_S32, &rank, {}});
  return site.Execute(BarrierExecute, run, std::move(xs), ys);
}

TEST_CASE("barrier: waits for all ranks, copies nothing") {
  Prepare();
  CallSite site;
  Attributes attributes = Call();
  attributes.AddArray<int32_t>("processes", {});
  CHECK(site.Instantiate(BarrierInstantiate, attributes).code == XLA_FFI_Error_Code_OK);
  int32_t ranks[kRanks] = {0, 1, 2, 3};
  float data[2] = {1, 2};
  const fake::Buffer x{XLA_FFI_DataType_F32, &data[0], {1}}, y{XLA_FFI_DataType_F32, &data[1], {1}};
  for (const auto& [operands, results, part] :
       {std::tuple<std::vector<fake::Buffer>, std::vector<fake::Buffer>, const char*>{
            {x}, {}, "expected one result per operand"},
        {{x, x}, {x}, "expected one result per operand"},
        {{x}, {y}, "must be aliased"},
        {{x, y}, {x, x}, "must be aliased"}}) {
    const XlaError error = EnterBarrier(site, ranks[0], operands, results)->Wait();
    CHECK(error.code == XLA_FFI_Error_Code_INVALID_ARGUMENT && error.text.find("jaxcomm: barrier") == 0);
    CHECK(error.text.find(part) != std::string::npos);
  }
  std::vector<std::unique_ptr<fake::XlaFuture>> futures;
  for (int32_t& rank : ranks) futures.push_back(EnterBarrier(site, rank, {x, y}, {x, y}));
  for (auto& future : futures) CHECK(future->Wait().code == XLA_FFI_Error_Code_OK);
  CHECK(data[0] == 1 && data[1] == 2);
  // A failed run does not affect the next one.
  int32_t stranger = 9;
  CHECK(EnterBarrier(site, stranger, {}, {}, 1002)->Wait().code == XLA_FFI_Error_Code_INVALID_ARGUMENT);
  futures.clear();
  for (int32_t& rank : ranks) futures.push_back(EnterBarrier(site, rank, {}, {}, 1003));
  for (auto& future : futures) CHECK(future->Wait().code == XLA_FFI_Error_Code_OK);
}

TEST_CASE("errors carry XLA's code and name the call") {
  Prepare(0.2);
  CallSite wrong;
  Attributes attributes = Call(false, 3);
  attributes.AddArray<int32_t>("processes", {});
  XlaError error = wrong.Instantiate(BarrierInstantiate, attributes);
  CHECK(error.code == XLA_FFI_Error_Code_INVALID_ARGUMENT && error.text.find("jaxcomm: an_op: 4 ranks") == 0);

  CallSite site;
  attributes = Call();
  attributes.AddArray<int32_t>("processes", {});
  attributes.AddScalar<int64_t>("reduce_op", XLA_FFI_DataType_S64, 0);
  CHECK(site.Instantiate(AllReduceInstantiate, attributes).code == XLA_FFI_Error_Code_OK);
  int32_t rank = 2, x = 1, y = 0;
  const auto execute = [&](XLA_FFI_DataType type, int64_t run) {
    return site.Execute(AllReduceExecute, run, {{XLA_FFI_DataType_S32, &rank, {}}, {type, &x, {1}}}, {{type, &y, {1}}})
        ->Wait();
  };
  error = execute(XLA_FFI_DataType_S4, 901);
  CHECK(error.code == XLA_FFI_Error_Code_INVALID_ARGUMENT);
  CHECK(error.text == "jaxcomm: unsupported element type " + std::to_string(XLA_FFI_DataType_S4));
  error = execute(XLA_FFI_DataType_S32, 902);  // the other ranks never arrive
  CHECK(error.code == XLA_FFI_Error_Code_DEADLINE_EXCEEDED);
  for (const char* part : {"jaxcomm: an_op at a_file.py:7: ", "[0, 1, 3]", "[2]"}) {
    CHECK(error.text.find(part) != std::string::npos);
  }
  Prepare();
  int32_t ranks[kRanks] = {0, 1, 2, 3}, sums[kRanks] = {};
  std::vector<std::unique_ptr<fake::XlaFuture>> futures;
  for (int32_t r = 0; r < kRanks; ++r) {  // the next run succeeds
    futures.push_back(site.Execute(AllReduceExecute, 903,
                                   {{XLA_FFI_DataType_S32, &ranks[r], {}}, {XLA_FFI_DataType_S32, &x, {1}}},
                                   {{XLA_FFI_DataType_S32, &sums[r], {1}}}));
  }
  for (auto& future : futures) CHECK(future->Wait().code == XLA_FFI_Error_Code_OK);
  for (const int32_t sum : sums) CHECK(sum == kRanks);
}

StatusOr<CallSpec> Decode(Collective collective, Attributes attributes) {
  const XLA_FFI_Attrs attrs = attributes.Get();
  ffi::ErrorOr<CallSpec> spec = DecodeCall(collective, ffi::Dictionary(&attrs));
  if (!spec) return InvalidArgumentError(spec.error().message());
  return *std::move(spec);
}

TEST_CASE("a call specification has the values of all attributes") {
  const std::vector<int64_t> groups = {4, 5, 6, 7}, source_of = {1, -1, 3, 2};
  const std::vector<int32_t> processes = {0, 0, 1, 1};
  Attributes call, all;
  call.AddText("algorithm", "ring");
  int64_t value = 4;
  for (const char* name : {"group_size", "max_sms"}) call.AddScalar(name, XLA_FFI_DataType_S64, value++);
  call.AddText("op", "psum");
  call.AddScalar<int64_t>("ranks_per_node", XLA_FFI_DataType_S64, 2);
  call.AddText("site", "train.py:3");
  all.AddDictionary("call", call);
  all.AddArray("groups", groups);
  all.AddScalar<int64_t>("input_contiguous_count", XLA_FFI_DataType_S64, 6);
  all.AddScalar<int64_t>("output_contiguous_count", XLA_FFI_DataType_S64, 7);
  all.AddArray("processes", processes);
  all.AddScalar<int64_t>("reduce_op", XLA_FFI_DataType_S64, 2);
  all.AddScalar<int64_t>("root", XLA_FFI_DataType_S64, 3);
  all.AddArray("source_of", source_of);
  const CallSpec spec = *Decode(Collective::kBroadcast, all);
  CHECK(spec.collective == Collective::kBroadcast && spec.op == "psum" && spec.site == "train.py:3");
  CHECK(spec.algorithm == "ring" && spec.groups == groups && spec.processes == processes);
  CHECK(spec.group_size == 4 && spec.max_sms == 5 && spec.ranks_per_node == 2 && spec.root == 3);
  CHECK(Decode(Collective::kAllToAll, all)->input_contiguous_count == 6 &&
        Decode(Collective::kAllToAll, all)->output_contiguous_count == 7);
  CHECK(Decode(Collective::kAllGather, all)->output_contiguous_count == 7);
  CHECK(Decode(Collective::kReduceScatter, all)->input_contiguous_count == 6);
  CHECK(Decode(Collective::kReduceScatter, all)->reduce_op == ReduceOp::kMin);
  CHECK(Decode(Collective::kAllReduce, all)->reduce_op == ReduceOp::kMin);
  CHECK(Decode(Collective::kPermute, all)->source_of == std::vector<int32_t>({1, -1, 3, 2}));
}

// Adds the names of numbers and arrays to a text.
struct Names {
  std::string* names;
  template <typename T>
  void operator()(const char* name, const T&) const {
    *names += (names->empty() ? "" : " ") + std::string(name);
  }
};

TEST_CASE("every attribute in a row of traits is an attribute of a call") {
  for (const CollectiveTraits& traits : Collectives()) {
    CallSpec spec;
    spec.collective = traits.collective;
    std::string names;
    VisitOtherAttributes(spec, Names{&names});
    const std::string common = "groups processes devices";
    CHECK(names == common + (*traits.attributes ? " " : "") + traits.attributes);
  }
}

TEST_CASE("a missing attribute is named") {
  const std::string where = "jaxcomm: an_op at a_file.py:7: attribute ";
  CHECK(Decode(Collective::kAllReduce, Call()).status().message() ==
        where + "reduce_op is missing or not of type int64");
  CHECK(Decode(Collective::kPermute, Call()).status().message() == where + "source_of is missing or not of type array");
  CHECK(Decode(Collective::kBarrier, Call()).ok());  // `processes` may be missing
  CHECK(Decode(Collective::kBarrier, {}).status().message().find("attribute call is missing") != std::string::npos);
  Attributes call, all;
  call.AddScalar<int64_t>("op", XLA_FFI_DataType_S64, 1);
  all.AddDictionary("call", call);
  CHECK(Decode(Collective::kBarrier, all).status().message().find("attribute op is missing or not of type string") !=
        std::string::npos);
}

// Processes match call sites by the hash, so calls with different attributes must have different hashes.
TEST_CASE("calls with different attributes have different hashes") {
  const auto differs = [](Collective collective, auto change) {
    CallSpec spec;
    spec.collective = collective;
    spec.groups = {0, 1};
    const uint64_t hash = HashAttributes(spec);
    CHECK(HashAttributes(spec) == hash);
    change(spec);
    return HashAttributes(spec) != hash;
  };
  const Collective barrier = Collective::kBarrier;
  CHECK(differs(barrier, [](CallSpec& spec) { spec.collective = Collective::kAllReduce; }));
  CHECK(differs(barrier, [](CallSpec& spec) { spec.op = "psum"; }));
  CHECK(differs(barrier, [](CallSpec& spec) { spec.site = "train.py:3"; }));
  CHECK(differs(barrier, [](CallSpec& spec) { spec.algorithm = "ring"; }));
  CHECK(differs(barrier, [](CallSpec& spec) { spec.group_size = 2; }));
  CHECK(differs(barrier, [](CallSpec& spec) { spec.ranks_per_node = 2; }));
  CHECK(differs(barrier, [](CallSpec& spec) { spec.asynchronous = 1; }));
  CHECK(differs(barrier, [](CallSpec& spec) { spec.number = 1; }));
  CHECK(differs(barrier, [](CallSpec& spec) { spec.groups = {1, 0}; }));
  CHECK(differs(barrier, [](CallSpec& spec) { spec.processes = {0, 1}; }));
  CHECK(differs(Collective::kAllToAll, [](CallSpec& spec) { spec.input_contiguous_count = 1; }));
  CHECK(differs(Collective::kAllToAll, [](CallSpec& spec) { spec.output_contiguous_count = 1; }));
  CHECK(differs(Collective::kAllReduce, [](CallSpec& spec) { spec.reduce_op = ReduceOp::kMax; }));
  CHECK(differs(Collective::kBroadcast, [](CallSpec& spec) { spec.root = 1; }));
  CHECK(differs(Collective::kPermute, [](CallSpec& spec) { spec.source_of = {1, 0}; }));
  // The boundary between two lists counts.
  const auto halves = [](std::vector<int64_t> groups, std::vector<int32_t> processes) {
    CallSpec spec;
    spec.groups = std::move(groups);
    spec.processes = std::move(processes);
    return HashAttributes(spec);
  };
  CHECK(halves({1, 2}, {3}) != halves({1}, {2, 3}));
}

// Names and sizes are those of ml_dtypes and NumPy.
TEST_CASE("every element type has its name and size") {
  struct Row {
    XLA_FFI_DataType type;
    const char* name;
    int64_t bytes;
  };
  const Row rows[] = {{XLA_FFI_DataType_PRED, "bool", 1},
                      {XLA_FFI_DataType_S8, "int8", 1},
                      {XLA_FFI_DataType_S16, "int16", 2},
                      {XLA_FFI_DataType_S32, "int32", 4},
                      {XLA_FFI_DataType_S64, "int64", 8},
                      {XLA_FFI_DataType_U8, "uint8", 1},
                      {XLA_FFI_DataType_U16, "uint16", 2},
                      {XLA_FFI_DataType_U32, "uint32", 4},
                      {XLA_FFI_DataType_U64, "uint64", 8},
                      {XLA_FFI_DataType_F16, "float16", 2},
                      {XLA_FFI_DataType_BF16, "bfloat16", 2},
                      {XLA_FFI_DataType_F32, "float32", 4},
                      {XLA_FFI_DataType_F64, "float64", 8},
                      {XLA_FFI_DataType_C64, "complex64", 8},
                      {XLA_FFI_DataType_C128, "complex128", 16},
                      {XLA_FFI_DataType_F8E5M2, "float8_e5m2", 1},
                      {XLA_FFI_DataType_F8E4M3FN, "float8_e4m3fn", 1},
                      {XLA_FFI_DataType_F8E4M3, "float8_e4m3", 1},
                      {XLA_FFI_DataType_F8E3M4, "float8_e3m4", 1},
                      {XLA_FFI_DataType_F8E4M3B11FNUZ, "float8_e4m3b11fnuz", 1},
                      {XLA_FFI_DataType_F8E5M2FNUZ, "float8_e5m2fnuz", 1},
                      {XLA_FFI_DataType_F8E4M3FNUZ, "float8_e4m3fnuz", 1},
                      {XLA_FFI_DataType_F8E8M0FNU, "float8_e8m0fnu", 1}};
  for (const Row& row : rows) {
    const auto dtype = FromFfi(static_cast<ffi::DataType>(row.type));
    CHECK(dtype.has_value() && row.name == std::string(Name(*dtype)) && ItemBytes(*dtype) == row.bytes);
    const bool ordered = row.name[0] != 'c', sums = row.type != XLA_FFI_DataType_F8E8M0FNU;
    CHECK(CanReduce(*dtype, ReduceOp::kSum) == sums);
    CHECK(CanReduce(*dtype, ReduceOp::kMax) == (sums && ordered));
    CHECK(CanReduce(*dtype, ReduceOp::kMin) == (sums && ordered));
  }
  for (const auto type : {XLA_FFI_DataType_INVALID, XLA_FFI_DataType_TOKEN, XLA_FFI_DataType_S4, XLA_FFI_DataType_U2}) {
    CHECK(!FromFfi(static_cast<ffi::DataType>(type)));
  }
}

}  // namespace
}  // namespace jaxcomm
