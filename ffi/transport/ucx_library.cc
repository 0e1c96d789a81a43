#include "transport/ucx_library.h"

#include <dlfcn.h>

#include <map>
#include <memory>
#include <mutex>
#include <type_traits>
#include <vector>

namespace jaxcomm {
namespace {

constexpr char kSystemLibrary[] = "libucp.so.0";

// Fails if `path` is not a usable library. `*stays`: the library was loaded nevertheless.
StatusOr<const UcxLibrary*> TryOpen(const std::string& path, bool* stays) {
  const bool loaded = dlopen(path.c_str(), RTLD_LAZY | RTLD_NOLOAD) != nullptr;
  void* const handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (!handle) return UnavailableError(dlerror());
  *stays = true;
  // Some builds of UCX install handlers of SIGSEGV and similar signals when they are loaded. Those belong to the
  // program.
  if (const auto restore = reinterpret_cast<void (*)()>(dlsym(handle, "ucs_debug_disable_signals"));
      restore && !loaded) {
    restore();
  }
  auto library = std::make_unique<UcxLibrary>();
  library->path = path;
  const char* missing = nullptr;
  const auto find = [&](auto& function, const char* name) {
    function = reinterpret_cast<std::decay_t<decltype(function)>>(dlsym(handle, name));
    if (!function) missing = name;
  };
#define JAXCOMM_FIND(result, name, parameters) find(library->name, #name);
  JAXCOMM_UCP_FUNCTIONS(JAXCOMM_FIND)
#undef JAXCOMM_FIND
  if (library->ucp_get_version) library->ucp_get_version(&library->major, &library->minor, &library->release);
  if (library->ucp_get_version && (library->major != ucp::kApiMajor || library->minor < kOldestUcxMinor)) {
    return UnavailableError(path + " is UCX " + library->version() + ", but jaxcomm needs " +
                            std::to_string(ucp::kApiMajor) + "." + std::to_string(kOldestUcxMinor) +
                            " or later of the same major version");
  }
  if (missing) return UnavailableError(path + " lacks the function " + missing);
  return static_cast<const UcxLibrary*>(library.release());
}

}  // namespace

std::string UcxLibrary::version() const {
  return std::to_string(major) + "." + std::to_string(minor) + "." + std::to_string(release);
}

StatusOr<const UcxLibrary*> UcxLibrary::Open(const std::string& path, const std::string& fallback) {
  static std::mutex mutex;
  static auto* const opened = new std::map<std::string, const UcxLibrary*>;
  std::lock_guard<std::mutex> lock(mutex);
  std::string tried;
  std::vector<std::string> candidates = {path};
  if (path.empty()) candidates = {kSystemLibrary, fallback};
  for (const std::string& candidate : candidates) {
    if (candidate.empty()) continue;
    const auto found = opened->find(candidate);
    if (found != opened->end()) return found->second;
    bool stays = false;
    const StatusOr<const UcxLibrary*> library = TryOpen(candidate, &stays);
    if (library.ok()) return opened->emplace(candidate, *library).first->second;
    tried += (tried.empty() ? "" : "; ") + library.status().message();
    // It cannot be unloaded, and the next candidate would resolve its own components, which have the same names, to it.
    if (stays && candidate == kSystemLibrary && !fallback.empty()) {
      return UnavailableError(tried + ". Set JAXCOMM_UCX_LIBRARY=" + fallback);
    }
  }
  return UnavailableError("no usable UCX: " + tried + ". Install UCX " + std::to_string(ucp::kApiMajor) + "." +
                          std::to_string(kOldestUcxMinor) + " or later, or the wheel libucx-cu12");
}

}  // namespace jaxcomm
