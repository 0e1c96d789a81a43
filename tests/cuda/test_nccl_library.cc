// Which NCCL is opened, and the errors if none can be used. Copies of fakes/nccl_symbols.cc replace NCCL.
#include <dlfcn.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "../../ffi/cuda/nccl/nccl_library.h"
#include "../check.h"
#include "fakes/alone.h"

namespace jaxcomm {
namespace {

const std::string kInstall = ". Install version " + NcclVersionText(NCCL_VERSION_CODE) +
                             " of the wheel that JAX's plugin uses, nvidia-nccl-cu12 or nvidia-nccl-cu13, never both";

// A folder that the process removes when it ends.
struct Folder {
  Folder() {
    char name[] = "/tmp/jaxcomm-nccl-XXXXXX";
    CHECK(mkdtemp(name) != nullptr);
    path = name;
  }
  ~Folder() { std::filesystem::remove_all(path); }
  std::string path;
};

// A library of this version in its own folder, without these functions.
std::string MakeLibrary(const Folder& folder, const std::string& name, const std::vector<std::string>& without = {}) {
  std::ifstream original(FAKE_NCCL, std::ios::binary);
  std::string bytes{std::istreambuf_iterator<char>(original), std::istreambuf_iterator<char>()};
  for (const std::string& function : without) {
    const std::string symbol = '\0' + function + '\0';
    const size_t at = bytes.find(symbol);
    CHECK(at != std::string::npos);
    bytes[at + 1] = 'x';
  }
  const std::filesystem::path place = std::filesystem::path(folder.path) / name;
  std::filesystem::create_directory(place);
  std::ofstream(place / "libnccl.so.2", std::ios::binary) << bytes;
  return place / "libnccl.so.2";
}

void SetVersion(int version) { setenv("FAKE_NCCL_VERSION", std::to_string(version).c_str(), 1); }

std::string Refusal(const std::string& wheel) {
  const StatusOr<const NcclLibrary*> opened = NcclLibrary::Open(wheel);
  CHECK(!opened.ok());
  return opened.status().message();
}

// NCCL refuses structures of a version later than its own.
TEST_CASE("properties have the version of the older side") {
  NcclLibrary nccl;
  for (const int version : {kOldestNccl, NCCL_VERSION_CODE, NCCL_VERSION_CODE + 100}) {
    nccl.version = version;
    const ncclCommProperties_t properties = NoProperties(nccl);
    CHECK(static_cast<int>(properties.version) == (version < NCCL_VERSION_CODE ? version : NCCL_VERSION_CODE));
    CHECK(properties.size == sizeof properties && properties.magic != 0);
  }
}

ALONE_TEST_CASE("the loaded copy has priority and stays") {
  const Folder folder;
  SetVersion(NCCL_VERSION_CODE);
  const std::string loaded = MakeLibrary(folder, "loaded"), wheel = MakeLibrary(folder, "wheel");
  CHECK(dlopen(loaded.c_str(), RTLD_NOW | RTLD_LOCAL) != nullptr);
  const StatusOr<const NcclLibrary*> found = NcclLibrary::Open(wheel);
  CHECK(found.ok());
  const NcclLibrary* const opened = *found;
  CHECK(opened->path == loaded && opened->version == NCCL_VERSION_CODE);
  CHECK(*NcclLibrary::Open("") == opened);
#define IS_FOUND(name) \
  CHECK(reinterpret_cast<void*>(opened->name) == dlsym(dlopen(loaded.c_str(), RTLD_NOW), "nccl" #name));
  JAXCOMM_NCCL_FUNCTIONS(IS_FOUND)
#undef IS_FOUND
}

TEST_CASE("then the wheel, also an older or newer one") {
  for (const int version : {kOldestNccl, NCCL_VERSION_CODE + 100}) {
    Alone([version] {
      const Folder folder;
      SetVersion(version);
      const std::string wheel = MakeLibrary(folder, "wheel");
      const StatusOr<const NcclLibrary*> found = NcclLibrary::Open(wheel);
      CHECK(found.ok() && (*found)->path == wheel && (*found)->version == version);
    });
  }
}

ALONE_TEST_CASE("a missing library") {
  if (dlopen("libnccl.so.2", RTLD_NOW | RTLD_LOCAL) != nullptr) return;  // the system has one
  const std::string none =
      "no NCCL: /nowhere/libnccl.so.2: cannot open shared object file: No such file or directory; ";
  const std::string said = Refusal("/nowhere/libnccl.so.2");
  CHECK(said.substr(0, none.size() + 12) == none + "libnccl.so.2");
  CHECK(Refusal("").substr(0, 21) == "no NCCL: libnccl.so.2" && said.substr(said.size() - kInstall.size()) == kInstall);
}

ALONE_TEST_CASE("a library that is too old or not NCCL") {
  const Folder folder;
  // NCCL 2.28.9 lacks these.
  const std::string old = MakeLibrary(
      folder, "old", {"ncclCommQueryProperties", "ncclGetLsaDevicePointer", "ncclGetLsaMultimemDevicePointer"});
  SetVersion(22809);
  const std::string built = ", but jaxcomm's kernels need 2.29.7 or later; algorithm=\"xla\" works with it";
  const std::string is = " is NCCL " + NcclVersionText(22809);
  CHECK(Refusal(old) == old + is + built + kInstall);
  // The library is still loaded.
  CHECK(Refusal("") == old + ", which this process had loaded before," + is + built + kInstall);
}

ALONE_TEST_CASE("a library that lacks a function") {
  const Folder folder;
  SetVersion(NCCL_VERSION_CODE);
  const std::string other = MakeLibrary(folder, "other", {"ncclGetVersion", "ncclDevCommCreate"});
  CHECK(Refusal(other) == other + " lacks ncclGetVersion, ncclDevCommCreate" + kInstall);
}

}  // namespace
}  // namespace jaxcomm
