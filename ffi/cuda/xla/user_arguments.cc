#include "cuda/xla/user_arguments.h"

#include <algorithm>
#include <iterator>
#include <string_view>

#include "common/hash.h"

namespace jaxcomm::cuda {
namespace {

template <typename Buffer>
uint64_t MixArray(uint64_t hash, const Buffer& buffer) {
  hash = Mix(hash, static_cast<uint64_t>(buffer.element_type()));
  for (const int64_t size : buffer.dimensions()) hash = Mix(hash, static_cast<uint64_t>(size));
  return Mix(hash, buffer.dimensions().size());
}

std::string_view TextOf(const XLA_FFI_ByteSpan& span) { return {span.ptr, span.len}; }

std::string_view BytesOf(const void* data, size_t count, XLA_FFI_DataType type) {
  return {static_cast<const char*>(data), count * ffi::ByteWidth(static_cast<ffi::DataType>(type))};
}

uint64_t HashOfValue(XLA_FFI_AttrType type, const void* value) {
  switch (type) {
    case XLA_FFI_AttrType_ARRAY: {
      const auto& array = *static_cast<const XLA_FFI_Array*>(value);
      return Mix(array.dtype, BytesOf(array.data, array.size, array.dtype));
    }
    case XLA_FFI_AttrType_DICTIONARY:
      return HashOf(*static_cast<const XLA_FFI_Attrs*>(value));
    case XLA_FFI_AttrType_SCALAR: {
      const auto& scalar = *static_cast<const XLA_FFI_Scalar*>(value);
      return Mix(scalar.dtype, BytesOf(scalar.value, 1, scalar.dtype));
    }
    case XLA_FFI_AttrType_STRING:
      return Mix(0, TextOf(*static_cast<const XLA_FFI_ByteSpan*>(value)));
  }
  return 0;
}

}  // namespace

uint64_t HashOf(const XLA_FFI_Attrs& attributes) {
  constexpr std::string_view kLeftOut[] = {"jaxcomm", "jaxcomm_no_windows", "jaxcomm_processes"};
  uint64_t hash = 0;
  for (int64_t i = 0; i < attributes.size; ++i) {
    const std::string_view name = TextOf(*attributes.names[i]);
    if (std::find(std::begin(kLeftOut), std::end(kLeftOut), name) != std::end(kLeftOut)) continue;
    const XLA_FFI_AttrType type = attributes.types[i];
    hash = Mix(Mix(Mix(hash, name), static_cast<uint64_t>(type)), HashOfValue(type, attributes.attrs[i]));
  }
  return hash;
}

uint64_t HashOf(ffi::RemainingArgs args, ffi::RemainingRets rets) {
  uint64_t hash = args.size();
  for (size_t i = 0; i < args.size(); ++i) {
    if (const auto operand = args.get<ffi::AnyBuffer>(i)) hash = MixArray(hash, *operand);
  }
  for (size_t i = 0; i < rets.size(); ++i) {
    if (auto result = rets.get<ffi::AnyBuffer>(i)) hash = MixArray(hash, **result);
  }
  return hash;
}

}  // namespace jaxcomm::cuda
