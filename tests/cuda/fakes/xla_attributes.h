// Attributes of a custom call, in the form in which XLA passes them to handlers.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "../../check.h"
#include "xla/ffi/api/c_api.h"

namespace jaxcomm {
namespace fake {

// Attributes as XLA passes them: sorted by name.
class Attributes {
 public:
  void Add(const std::string& name, XLA_FFI_AttrType type, std::shared_ptr<void> value) {
    names_.push_back(std::make_shared<std::string>(name));
    spans_.push_back(std::make_shared<XLA_FFI_ByteSpan>(XLA_FFI_ByteSpan{names_.back()->data(), name.size()}));
    CHECK(names_.size() < 2 || *names_[names_.size() - 2] < name);
    types_.push_back(type);
    values_.push_back(std::move(value));
  }
  template <typename T>
  void AddScalar(const std::string& name, XLA_FFI_DataType dtype, T value) {
    auto kept = std::make_shared<std::pair<XLA_FFI_Scalar, T>>(XLA_FFI_Scalar{dtype, nullptr}, value);
    kept->first.value = &kept->second;
    Add(name, XLA_FFI_AttrType_SCALAR, kept);
  }
  void AddText(const std::string& name, const std::string& text) {
    auto kept = std::make_shared<std::pair<XLA_FFI_ByteSpan, std::string>>(XLA_FFI_ByteSpan{}, text);
    kept->first = {kept->second.data(), text.size()};
    Add(name, XLA_FFI_AttrType_STRING, kept);
  }
  template <typename T = int64_t>
  void AddArray(const std::string& name, const std::vector<T>& values) {
    auto kept = std::make_shared<std::pair<XLA_FFI_Array, std::vector<T>>>(XLA_FFI_Array{}, values);
    kept->first = {sizeof(T) == 8 ? XLA_FFI_DataType_S64 : XLA_FFI_DataType_S32, values.size(), kept->second.data()};
    Add(name, XLA_FFI_AttrType_ARRAY, kept);
  }
  void AddDictionary(const std::string& name, const Attributes& inner) {
    struct Kept {
      XLA_FFI_Attrs attrs;
      Attributes inner;
    };
    auto kept = std::make_shared<Kept>();
    kept->inner = inner;
    kept->attrs = kept->inner.Get();
    Add(name, XLA_FFI_AttrType_DICTIONARY, kept);
  }
  XLA_FFI_Attrs Get() {
    name_pointers_.clear();
    value_pointers_.clear();
    for (const auto& span : spans_) name_pointers_.push_back(span.get());
    for (const auto& value : values_) value_pointers_.push_back(value.get());
    XLA_FFI_Attrs attrs = {};
    attrs.struct_size = XLA_FFI_Attrs_STRUCT_SIZE;
    attrs.size = static_cast<int64_t>(types_.size());
    attrs.types = types_.data();
    attrs.names = name_pointers_.data();
    attrs.attrs = value_pointers_.data();
    return attrs;
  }

 private:
  std::vector<std::shared_ptr<std::string>> names_;
  std::vector<std::shared_ptr<XLA_FFI_ByteSpan>> spans_;
  std::vector<XLA_FFI_AttrType> types_;
  std::vector<std::shared_ptr<void>> values_;
  std::vector<XLA_FFI_ByteSpan*> name_pointers_;
  std::vector<void*> value_pointers_;
};

// Adds those of jaxcomm.ffi_call: a call of `target` by groups of consecutive devices.
inline void AddUserCall(Attributes& all, const std::string& target, int num_ranks, int num_groups = 1,
                        int64_t max_sms = 0) {
  Attributes call;
  call.AddScalar<int64_t>("group_size", XLA_FFI_DataType_S64, num_ranks);
  call.AddScalar<int64_t>("max_sms", XLA_FFI_DataType_S64, max_sms);
  call.AddText("site", "model.py:7");
  call.AddText("target", target);
  all.AddDictionary("jaxcomm", call);
  std::vector<int64_t> groups;
  for (int r = 0; r < num_groups * num_ranks; ++r) groups.push_back(r);
  all.AddArray("jaxcomm_groups", groups);
}

}  // namespace fake
}  // namespace jaxcomm
