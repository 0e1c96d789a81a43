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
#define JAXCOMM_CASE(theirs, ours) \
  case ffi::DataType::theirs:      \
    return DType::ours;
    JAXCOMM_CASE(PRED, kBool)
    JAXCOMM_CASE(S8, kS8)
    JAXCOMM_CASE(S16, kS16)
    JAXCOMM_CASE(S32, kS32)
    JAXCOMM_CASE(S64, kS64)
    JAXCOMM_CASE(U8, kU8)
    JAXCOMM_CASE(U16, kU16)
    JAXCOMM_CASE(U32, kU32)
    JAXCOMM_CASE(U64, kU64)
    JAXCOMM_CASE(F16, kF16)
    JAXCOMM_CASE(BF16, kBF16)
    JAXCOMM_CASE(F32, kF32)
    JAXCOMM_CASE(F64, kF64)
    JAXCOMM_CASE(C64, kC64)
    JAXCOMM_CASE(C128, kC128)
    JAXCOMM_CASE(F8E5M2, kF8E5M2)
    JAXCOMM_CASE(F8E4M3FN, kF8E4M3FN)
    JAXCOMM_CASE(F8E4M3, kF8E4M3)
    JAXCOMM_CASE(F8E3M4, kF8E3M4)
    JAXCOMM_CASE(F8E4M3B11FNUZ, kF8E4M3B11FNUZ)
    JAXCOMM_CASE(F8E5M2FNUZ, kF8E5M2FNUZ)
    JAXCOMM_CASE(F8E4M3FNUZ, kF8E4M3FNUZ)
    JAXCOMM_CASE(F8E8M0FNU, kF8E8M0FNU)
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
