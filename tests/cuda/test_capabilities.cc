// The capabilities of a communicator over some GPUs: which ranks ask NCCL, and that a failure leaves nothing behind.
#include <atomic>
#include <string>
#include <thread>
#include <vector>

#include "../../ffi/cuda/nccl/capabilities.h"
#include "../../ffi/cuda/nccl/nccl_calls.h"
#include "../../ffi/cuda/nccl/threads.h"
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
  const StatusOr<ncclCommProperties_t> properties = QueryCommunicator(nccl, {4, 5, 6});
  CHECK(!properties.ok() || properties->nLsaTeams == 7);
  fault = {};
  return properties.status().message();
}

TEST_CASE("capabilities of a communicator; a failed query reports the reason and leaves nothing behind") {
  CHECK(Asked("").empty() && num_destroyed == 3 && num_aborted == 0 && made == std::vector<int>({4, 5, 6}) &&
        fake::current_device == 0);
  CHECK(Asked("cudaSetDevice", 1) == "cudaSetDevice(5): failed" && made.empty());
  CHECK(Asked("ncclGetUniqueId") == "ncclGetUniqueId: failed" && num_groups == 0 && made.empty());
  // The failure precedes the creation of all ranks, so nothing waits for the other ranks.
  CHECK(Asked("ncclCommInitRank", 1) == "ncclCommInitRank: failed" && num_groups == 0);
  CHECK(made == std::vector<int>({4}) && num_aborted == 1 && num_destroyed == 0);
  NcclLibrary nccl = Library();
  nccl.GroupEnd = [] { return --num_groups, ncclInternalError; };
  fault = {"ncclCommInitRank"};
  CHECK(QueryCommunicator(nccl, {4, 5, 6}).status().message() == "ncclCommInitRank: failed");  // what came first
  CHECK(Asked("ncclGroupEnd") == "ncclGroupEnd: failed" && num_aborted == 3 && num_destroyed == 0);
  CHECK(Asked("ncclCommQueryProperties") == "ncclCommQueryProperties: failed" && num_aborted == 3);
}

TEST_CASE("NCCL's own text for a failure") {
  NcclLibrary nccl = Library();
  for (const char* words : {"no route to host", "", static_cast<const char*>(nullptr)}) {
    static const char* last;
    last = words;
    nccl.GetLastError = [](ncclComm_t) { return last; };
    fault = {"ncclGetUniqueId"};
    const std::string expected =
        std::string("ncclGetUniqueId: failed") + (words && *words ? " (no route to host)" : "");
    CHECK(QueryCommunicator(nccl, {0}).status().message() == expected);
  }
}

// NCCL_COMM_BLOCKING=0
TEST_CASE("calls whose work goes on after they return") {
  static int num_left;
  static ncclResult_t outcome, asked;
  NcclLibrary nccl = Library();
  nccl.CommGetAsyncError = [](ncclComm_t, ncclResult_t* result) {
    return *result = --num_left > 0 ? ncclInProgress : outcome, num_left > 0 ? ncclSuccess : asked;
  };
  const auto call = [&](ncclResult_t end, ncclResult_t answer) {
    num_left = 3, outcome = end, asked = answer;
    auto* const comm = reinterpret_cast<ncclComm_t>(&num_left);
    const Status status = cuda::CallNccl(nccl, comm, "ncclThis", [] { return ncclSuccess; }, 20, {});
    return status.message() + std::to_string(num_left);
  };
  CHECK(call(ncclSuccess, ncclSuccess) == "0" && call(ncclSystemError, ncclSuccess) == "ncclThis: failed0");
  CHECK(call(ncclSuccess, ncclSystemError) == "ncclThis: failed0");
}

// The last one: no thread starts after it.
TEST_CASE("a query that does not end is an error in time") {
  static std::atomic<bool> released{false};
  static const NcclLibrary nccl = [] {
    NcclLibrary made = Library();
    made.GroupEnd = [] {
      while (!released) std::this_thread::yield();
      return --num_groups, ncclSuccess;
    };
    return made;
  }();
  num_groups = 0;
  CHECK(QueryCommunicator(nccl, {4, 5, 6}, 0.1).status().message() == "NCCL made no communicator of 3 GPUs within 0 s");
  released = true;
  CHECK(cuda::Threads::End(20));
}

}  // namespace
}  // namespace jaxcomm
