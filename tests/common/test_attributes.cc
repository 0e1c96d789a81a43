// Attributes of a call as XLA passes them, and their hash. tests/ops runs the handlers of each collective in XLA.
#include <set>
#include <string>
#include <vector>

#include "../../ffi/common/attributes.h"
#include "../check.h"
#include "../cuda/fakes/xla_attributes.h"

namespace jaxcomm {
namespace {

using fake::Attributes;

StatusOr<CallSpec> Decode(Collective collective, Attributes attributes) {
  const XLA_FFI_Attrs attrs = attributes.Get();
  ffi::ErrorOr<CallSpec> spec = DecodeCall(collective, ffi::Dictionary(&attrs));
  if (!spec) return InvalidArgumentError(spec.error().message());
  return *std::move(spec);
}

// Gives each field a value of its own, and adds it to the attributes.
struct Fill {
  Attributes* attributes;
  int* value;
  void operator()(const char* name, std::string& field) const {
    field = std::to_string(++*value);
    attributes->AddText(name, field);
  }
  template <typename T>
  void operator()(const char* name, std::vector<T>& field) const {
    field = {static_cast<T>(++*value), -1};
    attributes->AddArray(name, field);
  }
  template <typename T>
  void operator()(const char* name, T& field) const {
    field = static_cast<T>(++*value);
    attributes->AddScalar(name, XLA_FFI_DataType_S64, static_cast<int64_t>(field));
  }
};

TEST_CASE("a call specification has the values of all attributes") {
  for (const CollectiveTraits& traits : Collectives()) {
    CallSpec spec;
    spec.collective = traits.collective;
    Attributes call, all;
    int value = 0;
    VisitCallAttributes(spec, Fill{&call, &value});
    VisitOtherAttributes(spec, Fill{&all, &value});
    all.AddDictionary("call", call);
    CHECK(HashAttributes(*Decode(traits.collective, all)) == HashAttributes(spec));
  }
}

TEST_CASE("a missing attribute is named") {
  const auto error_of = [](Collective collective, const Attributes& call) {
    Attributes all;
    all.AddDictionary("call", call);
    all.AddArray<int64_t>("groups", {0, 1, 2, 3});
    return Decode(collective, all).status().message();
  };
  Attributes call;
  call.AddText("algorithm", "");
  for (const char* name : {"group_size", "max_sms"}) call.AddScalar<int64_t>(name, XLA_FFI_DataType_S64, 4);
  Attributes unnamed = call;
  unnamed.AddScalar<int64_t>("op", XLA_FFI_DataType_S64, 1);
  call.AddText("op", "an_op");
  call.AddScalar<int64_t>("ranks_per_node", XLA_FFI_DataType_S64, 4);
  call.AddText("site", "a_file.py:7");
  const std::string where = "jaxcomm: an_op at a_file.py:7: attribute ";
  CHECK(error_of(Collective::kAllReduce, call) == where + "reduce_op is missing or not of type int64");
  CHECK(error_of(Collective::kPermute, call) == where + "source_of is missing or not of type array");
  CHECK(error_of(Collective::kBarrier, call).empty());  // `processes` may be missing
  CHECK(error_of(Collective::kBarrier, unnamed).find("attribute op is missing or not of type string") !=
        std::string::npos);
  CHECK(Decode(Collective::kBarrier, {}).status().message().find("attribute call is missing") != std::string::npos);
}

// Changes one field.
struct ChangeOne {
  int* fields_before;
  bool IsMine() const { return (*fields_before)-- == 0; }
  void operator()(const char*, std::string& field) const {
    if (IsMine()) field += "x";
  }
  template <typename T>
  void operator()(const char*, std::vector<T>& field) const {
    if (IsMine()) field.push_back(0);
  }
  template <typename T>
  void operator()(const char*, T& field) const {
    if (IsMine()) field = static_cast<T>(field == T{} ? 1 : 0);
  }
};

// Processes match call sites by the hash.
TEST_CASE("calls that differ in one attribute or another have different hashes") {
  std::set<uint64_t> hashes;
  size_t num_calls = 0;
  for (const CollectiveTraits& traits : Collectives()) {
    for (int number = 0, left = -1; left < 0; ++number, ++num_calls) {  // the last call differs in no attribute
      CallSpec spec;
      spec.collective = traits.collective;
      left = number;
      VisitCallAttributes(spec, ChangeOne{&left});
      VisitOtherAttributes(spec, ChangeOne{&left});
      hashes.insert(HashAttributes(spec));
    }
  }
  CHECK(hashes.size() == num_calls);
}

}  // namespace
}  // namespace jaxcomm
