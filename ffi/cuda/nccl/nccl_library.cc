#include "cuda/nccl/nccl_library.h"

#include <dlfcn.h>
#include <link.h>

#include <algorithm>
#include <memory>
#include <mutex>

namespace jaxcomm {
namespace {

constexpr char kLibrary[] = "libnccl.so.2";

std::string WhatToInstall() {
  return "Install version " + NcclVersionText(NCCL_VERSION_CODE) +
         " or later of the wheel that JAX's plugin uses, nvidia-nccl-cu12 or nvidia-nccl-cu13, never both";
}

// A handle, or null and what was tried. `*loaded`: it was there before.
void* Find(const std::string& wheel_path, bool* loaded, std::string* error) {
  void* handle = dlopen(kLibrary, RTLD_NOW | RTLD_NOLOAD);
  *loaded = handle != nullptr;
  if (handle) return handle;
  std::string tried;
  for (const std::string& candidate : {wheel_path, std::string(kLibrary)}) {
    if (candidate.empty()) continue;
    if ((handle = dlopen(candidate.c_str(), RTLD_NOW | RTLD_LOCAL))) return handle;
    tried += (tried.empty() ? "" : "; ") + std::string(dlerror());
  }
  *error = "no NCCL: " + tried + ". " + WhatToInstall();
  return nullptr;
}

const NcclLibrary* TryOpen(const std::string& wheel_path, std::string* error) {
  bool loaded = false;
  void* const handle = Find(wheel_path, &loaded, error);
  if (!handle) return nullptr;
  auto library = std::make_unique<NcclLibrary>();
  std::string lacks;
#define JAXCOMM_FIND(name) library->name = reinterpret_cast<decltype(library->name)>(dlsym(handle, "nccl" #name));
#define JAXCOMM_FIND_NEEDED(name) \
  JAXCOMM_FIND(name)              \
  if (!library->name) lacks += (lacks.empty() ? "nccl" : ", nccl") + std::string(#name);
#define JAXCOMM_FIND_OPTIONAL(name) \
  JAXCOMM_FIND(name)                \
  if (!library->name) library->missing.push_back("nccl" #name);
  JAXCOMM_NCCL_NEEDED(JAXCOMM_FIND_NEEDED)
  JAXCOMM_NCCL_OPTIONAL(JAXCOMM_FIND_OPTIONAL)
#undef JAXCOMM_FIND_OPTIONAL
#undef JAXCOMM_FIND_NEEDED
#undef JAXCOMM_FIND
  // Of a copy that was there before, only the name that everybody opens it by is known.
  link_map* map = nullptr;
  library->path = dlinfo(handle, RTLD_DI_LINKMAP, &map) == 0 && map ? map->l_name : kLibrary;
  // The version first: an old NCCL lacks functions too.
  if (library->GetVersion) library->GetVersion(&library->version);
  if (library->GetVersion && library->version < NCCL_VERSION_CODE) {
    *error = library->path + (loaded ? ", which this process had loaded before," : "") + " is NCCL " +
             NcclVersionText(library->version) + ", but jaxcomm was built with the headers of " +
             NcclVersionText(NCCL_VERSION_CODE) + ". " + WhatToInstall();
    return nullptr;
  }
  if (!lacks.empty()) {
    *error = library->path + " lacks " + lacks + ". " + WhatToInstall();
    return nullptr;
  }
  return library.release();
}

}  // namespace

std::string NcclVersionText(int version) {
  return std::to_string(version / 10000) + "." + std::to_string(version / 100 % 100) + "." +
         std::to_string(version % 100);
}

std::string NcclLibrary::WhyNot(const std::string& name) const {
  if (std::find(missing.begin(), missing.end(), name) == missing.end()) return "";
  return path + " (NCCL " + NcclVersionText(version) + ") has no function " + name;
}

const NcclLibrary* NcclLibrary::Open(const std::string& wheel_path, std::string* error) {
  static std::mutex mutex;
  static const NcclLibrary* opened = nullptr;  // never deleted: NCCL leaves threads
  std::lock_guard<std::mutex> lock(mutex);
  if (!opened) opened = TryOpen(wheel_path, error);
  return opened;
}

}  // namespace jaxcomm
