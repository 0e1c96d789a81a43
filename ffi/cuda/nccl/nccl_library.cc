#include "cuda/nccl/nccl_library.h"

#include <dlfcn.h>
#include <link.h>

#include <memory>
#include <mutex>

namespace jaxcomm {
namespace {

constexpr char kLibrary[] = "libnccl.so.2";

std::string WhatToInstall() {
  return "Install version " + NcclVersionText(NCCL_VERSION_CODE) +
         " of the wheel that JAX's plugin uses, nvidia-nccl-cu12 or nvidia-nccl-cu13, never both";
}

// A handle, or an error that lists the attempts. `*loaded`: the process had loaded the library before.
StatusOr<void*> Find(const std::string& wheel_path, bool* loaded) {
  void* handle = dlopen(kLibrary, RTLD_NOW | RTLD_NOLOAD);
  *loaded = handle != nullptr;
  if (handle) return handle;
  std::string tried;
  for (const std::string& candidate : {wheel_path, std::string(kLibrary)}) {
    if (candidate.empty()) continue;
    if ((handle = dlopen(candidate.c_str(), RTLD_NOW | RTLD_LOCAL))) return handle;
    tried += (tried.empty() ? "" : "; ") + std::string(dlerror());
  }
  return UnavailableError("no NCCL: " + tried + ". " + WhatToInstall());
}

StatusOr<const NcclLibrary*> TryOpen(const std::string& wheel_path) {
  bool loaded = false;
  JAXCOMM_ASSIGN_OR_RETURN(void* const handle, Find(wheel_path, &loaded));
  auto library = std::make_unique<NcclLibrary>();
  std::string lacks;
#define JAXCOMM_FIND(name)                                                                \
  library->name = reinterpret_cast<decltype(library->name)>(dlsym(handle, "nccl" #name)); \
  if (!library->name) lacks += (lacks.empty() ? "nccl" : ", nccl") + std::string(#name);
  JAXCOMM_NCCL_FUNCTIONS(JAXCOMM_FIND)
#undef JAXCOMM_FIND
  // Fallback: the name by which the loader finds the library.
  link_map* map = nullptr;
  library->path = dlinfo(handle, RTLD_DI_LINKMAP, &map) == 0 && map ? map->l_name : kLibrary;
  // The version comes first, because an old NCCL lacks functions too.
  if (library->GetVersion) library->GetVersion(&library->version);
  if (library->GetVersion && library->version < kOldestNccl) {
    return UnavailableError(library->path + (loaded ? ", which this process had loaded before," : "") + " is NCCL " +
                            NcclVersionText(library->version) + ", but jaxcomm's kernels need " +
                            NcclVersionText(kOldestNccl) + " or later; algorithm=\"xla\" works with it. " +
                            WhatToInstall());
  }
  if (!lacks.empty()) return UnavailableError(library->path + " lacks " + lacks + ". " + WhatToInstall());
  return library.release();
}

}  // namespace

StatusOr<const NcclLibrary*> NcclLibrary::Open(const std::string& wheel_path) {
  static std::mutex mutex;
  static const NcclLibrary* opened = nullptr;  // never deleted: NCCL's threads outlive its communicators
  std::lock_guard<std::mutex> lock(mutex);
  if (!opened) {
    JAXCOMM_ASSIGN_OR_RETURN(opened, TryOpen(wheel_path));
  }
  return opened;
}

}  // namespace jaxcomm
