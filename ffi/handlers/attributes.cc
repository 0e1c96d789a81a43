#include "attributes.h"

namespace jaxcomm {

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

CallSpec MakeSpec(Collective collective, const CallAttributes& call, Groups groups, Processes processes) {
  CallSpec spec;
  spec.collective = collective;
  spec.op = call.op;
  spec.site = call.site;
  spec.algorithm = call.algorithm;
  spec.groups.assign(groups.begin(), groups.end());
  spec.processes.assign(processes.begin(), processes.end());
  spec.group_size = call.group_size;
  spec.ranks_per_node = call.ranks_per_node;
  spec.max_sms = call.max_sms;
  return spec;
}

}  // namespace jaxcomm
