// How UCX is found: the system's library, the fallback, a library that the user names, and each way to be unusable.
//
// fake_ucp.cc stands for UCX. The test program searches libraries in its working folder first (CMakeLists.txt), so
// each case runs in a child process, in a new folder whose libucp.so.0 is the system's library.
#include <dlfcn.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <string>
#include <utility>

#include "../../ffi/transport/ucx_library.h"
#include "../check.h"

namespace jaxcomm {
namespace {

constexpr char kSystem[] = "libucp.so.0";

void SetVersion(const char* major, const char* minor) {
  setenv("FAKE_UCP_MAJOR", major, 1);
  setenv("FAKE_UCP_MINOR", minor, 1);
  setenv("FAKE_UCP_RELEASE", "3", 1);
}

// Runs `body` in a child process, because a library stays loaded until the process ends. `system` is the path of the
// system's library; "" stands for a file that is no library, so that nothing else is found on any machine.
template <typename Body>
void WithSystem(const std::string& system, Body body) {
  char folder[] = "/tmp/jaxcomm_ucx_XXXXXX";
  CHECK(mkdtemp(folder));
  const std::string path = std::string(folder) + "/" + kSystem;
  if (system.empty()) {
    std::ofstream(path) << "not a library\n";
  } else {
    CHECK(symlink(system.c_str(), path.c_str()) == 0);
  }
  const pid_t child = fork();
  CHECK(child >= 0);
  if (child == 0) {
    CHECK(chdir(folder) == 0);
    SetVersion("1", "17");
    body();
    _exit(0);
  }
  int status = 0;
  CHECK(waitpid(child, &status, 0) == child);
  unlink(path.c_str());
  rmdir(folder);
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

bool Loaded(const char* path) { return dlopen(path, RTLD_LAZY | RTLD_NOLOAD) != nullptr; }

// Calls of ucs_debug_disable_signals().
int DisabledSignals() {
  return *static_cast<const int*>(dlsym(dlopen(kSystem, RTLD_LAZY | RTLD_NOLOAD), "fake_ucp_disabled_signals"));
}

TEST_CASE("the system's library comes before the fallback, and handlers of signals are removed unless it was loaded") {
  for (const bool loaded_before : {false, true}) {
    WithSystem(FAKE_UCP, [&] {
      if (loaded_before) CHECK(dlopen(FAKE_UCP, RTLD_NOW | RTLD_LOCAL));
      const UcxLibrary* const library = ValueOf(UcxLibrary::Open("", FAKE_UCP_ONLY_VERSION));
      CHECK(library->path == kSystem && library->version() == "1.17.3" && !Loaded(FAKE_UCP_ONLY_VERSION));
      CHECK(ValueOf(UcxLibrary::Open("", FAKE_UCP_ONLY_VERSION)) == library);
      CHECK(ValueOf(UcxLibrary::Open(kSystem, "")) == library);
      CHECK(DisabledSignals() == (loaded_before ? 0 : 1));
    });
  }
}

TEST_CASE("the user's library, or the fallback if the system has none, is opened once, with symbols of its own") {
  for (const bool named : {false, true}) {
    WithSystem("", [&] {
      const auto open = [&] { return ValueOf(UcxLibrary::Open(named ? FAKE_UCP : "", named ? "" : FAKE_UCP)); };
      const UcxLibrary* const library = open();
      CHECK(library->path == FAKE_UCP && open() == library);
      CHECK(dlsym(RTLD_DEFAULT, "ucp_request_free") == nullptr);
    });
  }
}

#define OLDER(version) "libucp.so.0 is UCX " version ", but jaxcomm needs 1.15 or later of the same major version"
#define WITHOUT " lacks the function ucp_get_version"
#define INSTALL ". Install UCX 1.15 or later, or the wheel libucx-cu12"

// A system library that is unusable stays loaded, so its components would be used by the fallback.
TEST_CASE("the error lists each library that was tried, and says what to do") {
  const struct {
    const char *system, *major, *minor, *path, *fallback, *error, *not_loaded;
  } cases[] = {
      {FAKE_UCP, "1", "14", "", FAKE_UCP_ONLY_VERSION,
       OLDER("1.14.3") ". Set JAXCOMM_UCX_LIBRARY=" FAKE_UCP_ONLY_VERSION, FAKE_UCP_ONLY_VERSION},
      {FAKE_UCP_WITHOUT_FREE, "1", "17", "", FAKE_UCP,
       "libucp.so.0 lacks the function ucp_request_free. Set JAXCOMM_UCX_LIBRARY=" FAKE_UCP, FAKE_UCP},
      {FAKE_UCP, "2", "15", "", "", "no usable UCX: " OLDER("2.15.3") INSTALL, FAKE_UCP_ONLY_VERSION},
      {"", "1", "17", "", FAKE_UCP_WITHOUT_VERSION, "; " FAKE_UCP_WITHOUT_VERSION WITHOUT INSTALL, FAKE_UCP},
      {FAKE_UCP, "1", "17", FAKE_UCP_WITHOUT_VERSION, FAKE_UCP,
       "no usable UCX: " FAKE_UCP_WITHOUT_VERSION WITHOUT INSTALL, kSystem},
  };
  for (const auto& [system, major, minor, path, fallback, expected, not_loaded] : cases) {
    const std::string end = expected, refused = not_loaded, beginning = *system != 0 ? end : "no usable UCX: ";
    WithSystem(system, [&, major = major, minor = minor, path = path, fallback = fallback] {
      SetVersion(major, minor);
      const std::string error = UcxLibrary::Open(path, fallback).status().message();
      CHECK(error.rfind(beginning, 0) == 0 && error.size() >= end.size());
      CHECK(error.substr(error.size() - end.size()) == end && !Loaded(refused.c_str()));
    });
  }
}

TEST_CASE("UCX older than 1.15 or of another major version is refused, and tried again later") {
  WithSystem("", [] {
    for (const auto& [major, minor] : {std::pair("1", "14"), {"0", "17"}, {"2", "17"}}) {
      SetVersion(major, minor);
      CHECK(!UcxLibrary::Open(FAKE_UCP, "").ok());
    }
    SetVersion("1", "15");
    CHECK(ValueOf(UcxLibrary::Open(FAKE_UCP, ""))->version() == "1.15.3");
  });
}

}  // namespace
}  // namespace jaxcomm
