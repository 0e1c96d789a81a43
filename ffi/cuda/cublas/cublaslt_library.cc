#include "cuda/cublas/cublaslt_library.h"

#include <dlfcn.h>
#include <link.h>

#include <memory>
#include <mutex>

namespace jaxcomm {
namespace {

// CUDA 12 and 13 have the same interface. JAX's plugin loads one of them.
constexpr const char* kNames[] = {"libcublasLt.so.13", "libcublasLt.so.12"};
constexpr char kInstall[] =
    ". Install JAX with its CUDA libraries (jax[cuda13] or jax[cuda12]), or pass another algorithm than \"fused\"";

auto& mutex = *new std::mutex;
auto& wheel = *new std::string;  // with the lock

// A handle, or an error that lists the attempts.
StatusOr<void*> Find(const std::string& wheel_path) {
  for (const char* const name : kNames) {
    if (void* const handle = dlopen(name, RTLD_NOW | RTLD_NOLOAD)) return handle;
  }
  std::string tried;
  for (const std::string& candidate : {wheel_path, std::string(kNames[0]), std::string(kNames[1])}) {
    if (candidate.empty()) continue;
    if (void* const handle = dlopen(candidate.c_str(), RTLD_NOW | RTLD_LOCAL)) return handle;
    tried += (tried.empty() ? "" : "; ") + std::string(dlerror());
  }
  return UnavailableError("no cuBLASLt: " + tried + kInstall);
}

StatusOr<const CublasLtLibrary*> TryOpen(const std::string& wheel_path) {
  const StatusOr<void*> found = Find(wheel_path);
  JAXCOMM_RETURN_IF_ERROR(found.status());
  auto library = std::make_unique<CublasLtLibrary>();
  link_map* map = nullptr;
  library->path = dlinfo(*found, RTLD_DI_LINKMAP, &map) == 0 && map ? map->l_name : "cuBLASLt";
  std::string lacks;
#define JAXCOMM_FIND(name, result, arguments)                                                 \
  library->name = reinterpret_cast<decltype(library->name)>(dlsym(*found, "cublasLt" #name)); \
  if (!library->name) lacks += (lacks.empty() ? "cublasLt" : ", cublasLt") + std::string(#name);
  JAXCOMM_CUBLASLT_FUNCTIONS(JAXCOMM_FIND)
#undef JAXCOMM_FIND
  if (!lacks.empty()) return UnavailableError(library->path + " lacks " + lacks + kInstall);
  library->version = library->GetVersion();
  return library.release();
}

}  // namespace

void CublasLtLibrary::SetWheel(const std::string& path) {
  std::lock_guard<std::mutex> lock(mutex);
  wheel = path;
}

StatusOr<const CublasLtLibrary*> CublasLtLibrary::Open() {
  static const CublasLtLibrary* opened = nullptr;  // never deleted: handles live as long as the process
  std::lock_guard<std::mutex> lock(mutex);
  if (!opened) {
    const StatusOr<const CublasLtLibrary*> found = TryOpen(wheel);
    JAXCOMM_RETURN_IF_ERROR(found.status());
    opened = *found;
  }
  return opened;
}

}  // namespace jaxcomm
