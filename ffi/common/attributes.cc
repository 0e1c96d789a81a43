#include "common/attributes.h"

#include <algorithm>
#include <iterator>
#include <string>
#include <string_view>
#include <vector>

namespace jaxcomm {
namespace {

// Fills in fields of `spec` from `attributes`. `error` is the first error.
struct FieldDecoder {
  const ffi::Dictionary& attributes;
  const CallSpec& spec;
  ffi::Error& error;

  void operator()(const char* name, std::string& field) const {
    const auto found = attributes.get<std::string_view>(name);
    if (!found) return Missing(name, "string");
    field = *found;
  }
  template <typename T>
  void operator()(const char* name, std::vector<T>& field) const {
    const auto wide = attributes.get<ffi::Span<const int64_t>>(name);
    const auto narrow = attributes.get<ffi::Span<const int32_t>>(name);
    if (wide) {
      field.assign(wide->begin(), wide->end());
    } else if (narrow) {
      field.assign(narrow->begin(), narrow->end());
    } else {
      Missing(name, "array");
    }
  }
  template <typename T>
  void operator()(const char* name, T& field) const {
    const auto found = attributes.get<int64_t>(name);
    if (!found) return Missing(name, "int64");
    field = static_cast<T>(*found);
  }

  void Missing(const char* name, const char* type) const {
    const std::string_view optional[] = {"processes", "devices", "asynchronous", "number"};
    if (!error.success() || std::find(std::begin(optional), std::end(optional), name) != std::end(optional)) return;
    error = ffi::Error::InvalidArgument(spec.Where() + ": attribute " + name + " is missing or not of type " + type);
  }
};

}  // namespace

std::optional<DType> FromFfi(ffi::DataType type) {
  switch (type) {
#define JAXCOMM_CASE(name, bytes, text, xla) \
  case ffi::DataType::xla:                   \
    return DType::k##name;
    JAXCOMM_DTYPES(JAXCOMM_CASE)
#undef JAXCOMM_CASE
    default:
      return std::nullopt;
  }
}

ffi::ErrorOr<CallSpec> DecodeCall(Collective collective, const ffi::Dictionary& attributes) {
  CallSpec spec;
  spec.collective = collective;
  const auto call = attributes.get<ffi::Dictionary>("call");
  if (!call) {
    return ffi::Unexpected(ffi::Error::InvalidArgument("jaxcomm: attribute call is missing or not of type dictionary"));
  }
  ffi::Error error;
  VisitCallAttributes(spec, FieldDecoder{*call, spec, error});
  if (error.success()) VisitOtherAttributes(spec, FieldDecoder{attributes, spec, error});
  if (!error.success()) return ffi::Unexpected(error);
  return spec;
}

}  // namespace jaxcomm
