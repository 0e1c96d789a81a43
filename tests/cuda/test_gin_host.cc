// The host code for GIN, on a fake of NCCL.
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
const ncclDevComm* made_at = nullptr;
uint32_t num_contexts = 4;  // that NCCL makes
uint8_t network = NCCL_GIN_TYPE_GDAKI;

ncclResult_t DevCommCreate(ncclComm_t, const ncclDevCommRequirements_t* requirements, ncclDevComm_t* comm) {
  asked = *requirements;
  made_at = comm;
  comm->ginContextCount = num_contexts;
  comm->ginNetDeviceTypes[0] = network;
  return ncclInProgress;
}

NcclLibrary Library() {
  NcclLibrary nccl;
  nccl.version = NCCL_VERSION_CODE;
  nccl.DevCommCreate = &DevCommCreate;
  return nccl;
}

TEST_CASE("where GIN can be used, and why not") {
  NcclLibrary nccl = Library();
  ncclCommProperties_t properties = NCCL_COMM_PROPERTIES_INITIALIZER;
  const auto says = [&](const std::string& part) {
    return Gin::Problem(nccl, properties).message().find(part) != std::string::npos;
  };
  properties.ginType = properties.railedGinType = NCCL_GIN_TYPE_PROXY;
  CHECK(Gin::Problem(nccl, properties).ok());
  properties.ginType = NCCL_GIN_TYPE_NONE;
  CHECK(says("on rails only"));
  properties.railedGinType = NCCL_GIN_TYPE_NONE;
  CHECK(says("NCCL offers no GIN on this network"));
  properties.ginType = NCCL_GIN_TYPE_GDAKI;
  // NCCL itself would accept the kernels in a newer version.
  const std::string built = NcclVersionText(NCCL_VERSION_CODE);
  for (const int other : {NCCL_VERSION_CODE + 1, NCCL_VERSION_CODE - 1}) {
    nccl = Library();
    nccl.path = "libnccl.so.2";
    nccl.version = other;
    CHECK(says("jaxcomm has kernels with GIN for NCCL " + built + ", but libnccl.so.2 is " + NcclVersionText(other) +
               ". Install nvidia-nccl-cu12==" + built + " or nvidia-nccl-cu13==" + built));
  }
}

// Up to 32 channels on 4 contexts fit in NCCL's default of 128, and 8 on one context.
TEST_CASE("the depth of NCCL's queues, and of fewer contexts than asked") {
  const auto problem = [](uint32_t contexts, int32_t num_channels, uint8_t type = NCCL_GIN_TYPE_GDAKI) {
    num_contexts = contexts;
    network = type;
    uint64_t counts[1];
    device::Comm comm;
    comm.signals.num_channels = num_channels;
    return Gin::Make(Library(), nullptr, comm, counts, [](const char*, ncclResult_t) { return OkStatus(); }).status();
  };
  const std::pair<int32_t, int> depths[] = {{1, 128}, {32, 128}, {33, 256}, {64, 256}, {132, 1024}};
  for (const auto& [num_channels, depth] : depths) {
    CHECK(problem(4, num_channels).ok() && asked.ginContextCount == 4 && asked.ginQueueDepth == depth);
  }
  CHECK(problem(1, 8).ok());
  CHECK(problem(1, 9).message() ==
        "NCCL made 1 contexts of GIN instead of 4, whose queues of 128 entries are too short for 9 channels. Lower "
        "JAXCOMM_MAX_SMS, or update the GIN plugin");
  CHECK(problem(1, 9, NCCL_GIN_TYPE_PROXY).ok());  // its queues have a depth of their own
  CHECK(problem(2, 16).ok() && !problem(2, 17).ok());
}

TEST_CASE("what a communicator asks of NCCL") {
  device::Comm comm;
  comm.world = {5, 6, 0, 1};
  comm.local = {1, 2, 4, 1};
  comm.signals.num_channels = 7;
  uint64_t counts[7 * 7];
  CHECK(Gin::CountBytes(7, 6) == sizeof counts);
  const auto make = [&](const Status& status) {
    return Gin::Make(Library(), nullptr, comm, counts, [&](const char* name, ncclResult_t result) {
      CHECK(std::string(name) == "ncclDevCommCreate" && result == ncclInProgress);
      return status;
    });
  };
  CHECK(make(UnavailableError("no")).status().message() == "no");
  const std::unique_ptr<Gin> gin = ValueOf(make(OkStatus()));
  CHECK(&gin->nccl_comm() == made_at);
  CHECK(asked.version == NCCL_VERSION_CODE && asked.ginConnectionType == NCCL_GIN_CONNECTION_FULL);
  CHECK(asked.ginSignalCount == 7 * 6 && asked.ginCounterCount == 7 && asked.ginContextCount > 0);
  CHECK(asked.ginStrongSignalsRequired && !asked.ginVaSignalsRequired && asked.ginExclusiveContexts);
}

}  // namespace
}  // namespace cuda
}  // namespace jaxcomm
