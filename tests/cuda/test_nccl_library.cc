// Which NCCL is opened, and what is said where it can't be used. Copies of fakes/nccl_symbols.cc stand in for NCCL.
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

const std::string kInstall =
    ". Install version " + NcclVersionText(NCCL_VERSION_CODE) +
    " or later of the wheel that JAX's plugin uses, nvidia-nccl-cu12 or nvidia-nccl-cu13, never both";

// A folder that goes with the process.
struct Folder {
  Folder() {
    char name[] = "/tmp/jaxcomm-nccl-XXXXXX";
    CHECK(mkdtemp(name) != nullptr);
    path = name;
  }
  ~Folder() { std::filesystem::remove_all(path); }
  std::string path;
};

// A library of this version in a folder of its own, without these functions.
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
  std::string error;
  CHECK(NcclLibrary::Open(wheel, &error) == nullptr);
  return error;
}

TEST_CASE("versions of NCCL as people write them") {
  CHECK(NcclVersionText(23007) == "2.30.7" && NcclVersionText(20000) == "2.0.0" && NcclVersionText(22809) == "2.28.9" &&
        NcclVersionText(30112) == "3.1.12");
}

ALONE_TEST_CASE("the loaded copy comes first, and stays") {
  const Folder folder;
  SetVersion(NCCL_VERSION_CODE);
  const std::string loaded = MakeLibrary(folder, "loaded"), wheel = MakeLibrary(folder, "wheel");
  CHECK(dlopen(loaded.c_str(), RTLD_NOW | RTLD_LOCAL) != nullptr);
  std::string error;
  const NcclLibrary* const opened = NcclLibrary::Open(wheel, &error);
  CHECK(opened != nullptr && opened->path == loaded && opened->version == NCCL_VERSION_CODE);
  CHECK(opened->missing.empty() && opened->WhyNot("ncclMemAlloc").empty());
  CHECK(NcclLibrary::Open("", &error) == opened && error.empty());
#define IS_FOUND(name) \
  CHECK(reinterpret_cast<void*>(opened->name) == dlsym(dlopen(loaded.c_str(), RTLD_NOW), "nccl" #name));
  JAXCOMM_NCCL_NEEDED(IS_FOUND)
  JAXCOMM_NCCL_OPTIONAL(IS_FOUND)
#undef IS_FOUND
}

ALONE_TEST_CASE("then the wheel, also a newer one") {
  const Folder folder;
  SetVersion(NCCL_VERSION_CODE + 100);
  const std::string wheel = MakeLibrary(folder, "wheel", {"ncclMemAlloc", "ncclDevCommCreate"});
  std::string error;
  const NcclLibrary* const opened = NcclLibrary::Open(wheel, &error);
  CHECK(opened != nullptr && opened->path == wheel && opened->version == NCCL_VERSION_CODE + 100);
  CHECK(opened->missing == std::vector<std::string>({"ncclMemAlloc", "ncclDevCommCreate"}));
  CHECK(opened->MemAlloc == nullptr && opened->MemFree != nullptr && opened->WhyNot("ncclMemFree").empty());
  CHECK(opened->WhyNot("ncclMemAlloc") ==
        wheel + " (NCCL " + NcclVersionText(NCCL_VERSION_CODE + 100) + ") has no function ncclMemAlloc");
}

ALONE_TEST_CASE("a library that is not there") {
  if (dlopen("libnccl.so.2", RTLD_NOW | RTLD_LOCAL) != nullptr) return;  // of the system
  const std::string none =
      "no NCCL: /nowhere/libnccl.so.2: cannot open shared object file: No such file or directory; ";
  const std::string said = Refusal("/nowhere/libnccl.so.2");
  CHECK(said.substr(0, none.size() + 12) == none + "libnccl.so.2");
  CHECK(Refusal("").substr(0, 21) == "no NCCL: libnccl.so.2" && said.substr(said.size() - kInstall.size()) == kInstall);
}

ALONE_TEST_CASE("a library that is too old, or is none of NCCL's") {
  const Folder folder;
  const std::string old = MakeLibrary(folder, "old", {"ncclSend"});  // an old one lacks functions too
  SetVersion(NCCL_VERSION_CODE - 1);
  const std::string built = ", but jaxcomm was built with the headers of " + NcclVersionText(NCCL_VERSION_CODE);
  const std::string is = " is NCCL " + NcclVersionText(NCCL_VERSION_CODE - 1);
  CHECK(Refusal(old) == old + is + built + kInstall);
  // It is still loaded.
  CHECK(Refusal("") == old + ", which this process had loaded before," + is + built + kInstall);
}

ALONE_TEST_CASE("a library that lacks what is needed") {
  const Folder folder;
  SetVersion(NCCL_VERSION_CODE);
  const std::string other = MakeLibrary(folder, "other", {"ncclGetVersion", "ncclSend"});
  CHECK(Refusal(other) == other + " lacks ncclGetVersion, ncclSend" + kInstall);
}

}  // namespace
}  // namespace jaxcomm
