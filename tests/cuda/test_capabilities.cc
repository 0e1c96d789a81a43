// What a communicator over some GPUs can do: whom NCCL is asked for, and that nothing is left when it fails.
#include <string>
#include <vector>

#include "../../ffi/cuda/nccl/capabilities.h"
#include "fakes/machine.h"

namespace jaxcomm {
namespace {

using fake::Fails;
using fake::fault;

std::vector<int> made;  // devices of ranks
int num_groups, num_destroyed, num_aborted;

ncclResult_t InitRank(ncclComm_t* comm, int num_ranks, ncclUniqueId key, int rank) {
  CHECK(num_groups == 1 && num_ranks == 3 && key.internal[0] == 'k');
  if (Fails("ncclCommInitRank")) return ncclInvalidArgument;
  *comm = reinterpret_cast<ncclComm_t>(static_cast<uintptr_t>(1 + rank));
  made.push_back(fake::current_device);
  return ncclSuccess;
}

NcclLibrary Library() {
  NcclLibrary nccl = fake::FakeLibrary();
  nccl.GetUniqueId = [](ncclUniqueId* key) {
    key->internal[0] = 'k';
    return Fails("ncclGetUniqueId") ? ncclSystemError : ncclSuccess;
  };
  nccl.GroupStart = [] { return Fails("ncclGroupStart") ? ncclInternalError : (++num_groups, ncclSuccess); };
  nccl.GroupEnd = [] { return --num_groups, Fails("ncclGroupEnd") ? ncclInternalError : ncclSuccess; };
  nccl.CommInitRank = &InitRank;
  nccl.CommQueryProperties = [](ncclComm_t comm, ncclCommProperties_t* properties) {
    CHECK(num_groups == 0 && reinterpret_cast<uintptr_t>(comm) == 1 && properties->magic != 0);
    if (Fails("ncclCommQueryProperties")) return ncclInternalError;
    properties->nLsaTeams = 7;
    return ncclSuccess;
  };
  nccl.CommDestroy = [](ncclComm_t) { return ++num_destroyed, ncclSuccess; };
  nccl.CommAbort = [](ncclComm_t) { return ++num_aborted, ncclSuccess; };
  return nccl;
}

std::string Asked(const char* failing, int skipped = 0) {
  const NcclLibrary nccl = Library();
  num_groups = num_destroyed = num_aborted = 0;
  made.clear();
  fault = {failing, skipped};
  ncclCommProperties_t properties = {};
  const std::string failure = QueryCommunicator(nccl, {4, 5, 6}, &properties);
  CHECK(failure.empty() == (properties.nLsaTeams == 7));
  fault = {};
  return failure;
}

TEST_CASE("what a communicator can do") {
  CHECK(Asked("").empty() && num_destroyed == 3 && num_aborted == 0 && made == std::vector<int>({4, 5, 6}) &&
        fake::current_device == 0);
}

TEST_CASE("a question that fails says why and leaves nothing") {
  CHECK(Asked("cudaSetDevice", 1) == "cudaSetDevice(5): failed" && made.empty());
  CHECK(Asked("ncclGetUniqueId") == "ncclGetUniqueId: failed" && num_groups == 0 && made.empty());
  // Before all ranks are made: the others are not waited for.
  CHECK(Asked("ncclCommInitRank", 1) == "ncclCommInitRank: failed" && num_groups == 0);
  CHECK(made == std::vector<int>({4}) && num_aborted == 1 && num_destroyed == 0);
  NcclLibrary nccl = Library();
  nccl.GroupEnd = [] { return --num_groups, ncclInternalError; };
  fault = {"ncclCommInitRank"};
  ncclCommProperties_t properties = {};
  CHECK(QueryCommunicator(nccl, {4, 5, 6}, &properties) == "ncclCommInitRank: failed");  // what came first
  CHECK(Asked("ncclGroupEnd") == "ncclGroupEnd: failed" && num_aborted == 3 && num_destroyed == 0);
  CHECK(Asked("ncclCommQueryProperties") == "ncclCommQueryProperties: failed" && num_aborted == 3);
}

TEST_CASE("NCCL's own words for a failure") {
  NcclLibrary nccl = Library();
  ncclCommProperties_t properties = {};
  for (const char* words : {"no route to host", "", static_cast<const char*>(nullptr)}) {
    static const char* last;
    last = words;
    nccl.GetLastError = [](ncclComm_t) { return last; };
    fault = {"ncclGetUniqueId"};
    const std::string expected =
        std::string("ncclGetUniqueId: failed") + (words && *words ? " (no route to host)" : "");
    CHECK(QueryCommunicator(nccl, {0}, &properties) == expected);
  }
}

}  // namespace
}  // namespace jaxcomm
