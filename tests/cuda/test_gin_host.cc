// What the host does for GIN, on a fake of NCCL.
#include <nccl_device/comm.h>
#include <nccl_device/impl/comm__types.h>

#include <cstdio>
#include <cstdlib>

#include "../../ffi/cuda/nccl/gin.h"
#include "../check.h"

namespace jaxcomm {
namespace cuda {
namespace {

ncclDevCommRequirements_t asked;
ncclDevComm_t* made_at = nullptr;

ncclResult_t DevCommCreate(ncclComm_t, const ncclDevCommRequirements_t* requirements, ncclDevComm_t* comm) {
  asked = *requirements;
  made_at = comm;
  return ncclInProgress;
}

NcclLibrary Library() {
  NcclLibrary nccl;
  nccl.version = NCCL_VERSION_CODE;
  nccl.DevCommCreate = &DevCommCreate;
  return nccl;
}

TEST_CASE("where GIN can be used") {
  NcclLibrary nccl = Library();
  ncclCommProperties_t properties = NCCL_COMM_PROPERTIES_INITIALIZER;
  properties.ginType = properties.railedGinType = NCCL_GIN_TYPE_PROXY;
  CHECK(Gin::Usable(nccl, properties));
  properties.ginType = NCCL_GIN_TYPE_NONE;  // on rails only
  CHECK(!Gin::Usable(nccl, properties));
  properties.ginType = NCCL_GIN_TYPE_GDAKI;
  nccl.DevCommCreate = nullptr;
  CHECK(!Gin::Usable(nccl, properties));
  // Newer is as bad as older.
  nccl = Library();
  nccl.version = NCCL_VERSION_CODE + 1;
  CHECK(!Gin::Usable(nccl, properties));
}

device::Comm SomeComm() {
  device::Comm comm;
  comm.world = {5, 6, 0, 1};
  comm.local = {1, 2, 4, 1};
  comm.signals.num_channels = 7;
  comm.timeout_ns = 123;
  comm.call_id = 9;
  return comm;
}

TEST_CASE("what kernels get") {
  const NcclLibrary nccl = Library();
  uint64_t counts[7 * 7];
  CHECK(Gin::CountBytes(7, 6) == sizeof counts);
  std::string error;
  ncclResult_t checked = ncclSuccess;
  const auto ends_as = [&](bool ok) {
    return [&checked, ok](const char* name, ncclResult_t result, std::string* problem) {
      CHECK(std::string(name) == "ncclDevCommCreate");
      checked = result;
      if (!ok) *problem = "no";
      return ok;
    };
  };
  CHECK(Gin::Make(nccl, nullptr, SomeComm(), counts, ends_as(false), &error) == nullptr && error == "no");
  CHECK(checked == ncclInProgress);
  const auto gin = Gin::Make(nccl, nullptr, SomeComm(), counts, ends_as(true), &error);
  CHECK(gin != nullptr && &gin->nccl_comm() == made_at);
  CHECK(asked.version == NCCL_VERSION_CODE && asked.ginConnectionType == NCCL_GIN_CONNECTION_FULL);
  CHECK(asked.ginSignalCount == 7 * 6 && asked.ginCounterCount == 7 && asked.ginContextCount > 0);
  CHECK(asked.ginStrongSignalsRequired && !asked.ginVaSignalsRequired);

  ArenaLayout layout;
  layout.output = 4096;
  layout.scratch = 8192;
  const auto window = reinterpret_cast<ncclWindow_t>(uintptr_t{64});
  const GinNetworkArgs args = gin->Args(SomeComm(), window, layout);
  CHECK(args.comm.local.rank == 5 && args.comm.local.size == 6 && args.comm.local.World(3) == 3);
  CHECK(args.comm.timeout_ns == 123 && args.comm.call_id == 9);
  CHECK(args.comm.signals.received == counts && args.puts == counts + 7 * 6);
  CHECK(args.input.window == window && args.input.offset == 0);
  CHECK(args.BufferOf({2, Space::kOutput, 0}).offset == 4096 && args.BufferOf({2, Space::kScratch, 0}).offset == 8192);
}

}  // namespace
}  // namespace cuda
}  // namespace jaxcomm
