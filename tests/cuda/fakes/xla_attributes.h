// Attributes of a custom call, in the form in which XLA passes them to handlers.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "xla/ffi/api/c_api.h"

namespace jaxcomm {
namespace fake {

// Attributes as XLA passes them: sorted by name.
class Attributes {
 public:
  void Add(const std::string& name, XLA_FFI_AttrType type, std::shared_ptr<void> value) {
    values_[name] = {type, std::move(value)};
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
    types_.clear(), names_.clear(), name_pointers_.clear(), value_pointers_.clear();
    names_.reserve(values_.size());
    for (const auto& [name, value] : values_) {
      types_.push_back(value.first);
      names_.push_back({name.data(), name.size()});
      name_pointers_.push_back(&names_.back());
      value_pointers_.push_back(value.second.get());
    }
    XLA_FFI_Attrs attrs = {};
    attrs.struct_size = XLA_FFI_Attrs_STRUCT_SIZE;
    attrs.size = static_cast<int64_t>(types_.size());
    attrs.types = types_.data();
    attrs.names = name_pointers_.data();
    attrs.attrs = value_pointers_.data();
    return attrs;
  }

 private:
  std::map<std::string, std::pair<XLA_FFI_AttrType, std::shared_ptr<void>>> values_;
  std::vector<XLA_FFI_AttrType> types_;
  std::vector<XLA_FFI_ByteSpan> names_;
  std::vector<XLA_FFI_ByteSpan*> name_pointers_;
  std::vector<void*> value_pointers_;
};

}  // namespace fake
}  // namespace jaxcomm
