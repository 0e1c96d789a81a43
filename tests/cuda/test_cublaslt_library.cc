// Which cuBLASLt is opened, and the errors if none can be used. Copies of fakes/cublaslt_symbols.cc replace it.
#include <dlfcn.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>

#include "../../ffi/cuda/cublas/cublaslt_library.h"
#include "../check.h"
#include "fakes/alone.h"

namespace jaxcomm {
namespace {

// A folder that the process removes when it ends.
struct Folder {
  Folder() {
    char name[] = "/tmp/jaxcomm-cublaslt-XXXXXX";
    CHECK(mkdtemp(name) != nullptr);
    path = name;
  }
  ~Folder() { std::filesystem::remove_all(path); }
  std::string path;
};

// A copy of the library, without a function.
std::string MakeLibrary(const Folder& folder, const std::string& name, const std::string& without = "") {
  std::ifstream original(FAKE_CUBLASLT, std::ios::binary);
  std::string bytes{std::istreambuf_iterator<char>(original), std::istreambuf_iterator<char>()};
  if (!without.empty()) {
    const size_t at = bytes.find('\0' + without + '\0');
    CHECK(at != std::string::npos);
    bytes[at + 1] = 'x';
  }
  const std::filesystem::path place = std::filesystem::path(folder.path) / name;
  std::ofstream(place, std::ios::binary) << bytes;
  return place;
}

bool EndsWith(const std::string& text, const std::string& end) {
  return text.size() >= end.size() && text.compare(text.size() - end.size(), end.size(), end) == 0;
}

ALONE_TEST_CASE("the loaded cuBLASLt has priority and stays") {
  const Folder folder;
  const std::string loaded = MakeLibrary(folder, "loaded.so"), wheel = MakeLibrary(folder, "wheel.so");
  CHECK(dlopen(loaded.c_str(), RTLD_NOW | RTLD_LOCAL) != nullptr);
  CublasLtLibrary::SetWheel(wheel);
  const StatusOr<const CublasLtLibrary*> found = CublasLtLibrary::Open();
  CHECK(found.ok() && (*found)->path == loaded && (*found)->version == 1);
#define IS_FOUND(name, result, arguments) \
  CHECK(reinterpret_cast<void*>((*found)->name) == dlsym(dlopen(loaded.c_str(), RTLD_NOW), "cublasLt" #name));
  JAXCOMM_CUBLASLT_FUNCTIONS(IS_FOUND)
#undef IS_FOUND
  CHECK(*CublasLtLibrary::Open() == *found);
}

ALONE_TEST_CASE("then the cuBLASLt of the wheel") {
  const Folder folder;
  const std::string wheel = MakeLibrary(folder, "wheel.so");
  CublasLtLibrary::SetWheel(wheel);
  const StatusOr<const CublasLtLibrary*> found = CublasLtLibrary::Open();
  CHECK(found.ok() && (*found)->path == wheel);
}

ALONE_TEST_CASE("no cuBLASLt") {
  for (const char* const name : {"libcublasLt.so.13", "libcublasLt.so.12"}) {
    if (dlopen(name, RTLD_NOW | RTLD_LOCAL) != nullptr) return;  // the system has one
  }
  CublasLtLibrary::SetWheel("/nowhere/libcublasLt.so.13");
  const std::string said = CublasLtLibrary::Open().status().message();
  CHECK(said.find("no cuBLASLt: /nowhere/libcublasLt.so.13: ") == 0);
  CHECK(said.find("; libcublasLt.so.13: ") != std::string::npos &&
        said.find("; libcublasLt.so.12: ") != std::string::npos);
  CHECK(EndsWith(said,
                 "Install JAX with its CUDA libraries (jax[cuda13] or jax[cuda12]), or pass another algorithm than "
                 "\"fused\""));
}

ALONE_TEST_CASE("a cuBLASLt that lacks a function") {
  const Folder folder;
  const std::string other = MakeLibrary(folder, "other.so", "cublasLtMatmulAlgoGetHeuristic");
  CublasLtLibrary::SetWheel(other);
  CHECK(CublasLtLibrary::Open().status().message().find(other + " lacks cublasLtMatmulAlgoGetHeuristic. Install") == 0);
}

}  // namespace
}  // namespace jaxcomm
