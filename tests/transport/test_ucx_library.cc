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

#include "../../ffi/transport/ucx_library.h"
#include "../check.h"

namespace jaxcomm {
namespace {

constexpr char kSystem[] = "libucp.so.0";
constexpr char kInstall[] = ". Install UCX 1.15 or later, or the wheel libucx-cu12";

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

std::string ErrorOf(const std::string& path, const std::string& fallback) {
  const auto library = UcxLibrary::Open(path, fallback);
  CHECK(!library.ok());
  return library.status().message();
}

bool Loaded(const char* path) { return dlopen(path, RTLD_LAZY | RTLD_NOLOAD) != nullptr; }

// A symbol of a loaded library.
void* Symbol(const char* path, const char* name) {
  void* const handle = dlopen(path, RTLD_LAZY | RTLD_NOLOAD);
  CHECK(handle);
  return dlsym(handle, name);
}

int DisabledSignals(const char* path) { return *static_cast<const int*>(Symbol(path, "fake_ucp_disabled_signals")); }

TEST_CASE("the system's library comes before the fallback") {
  WithSystem(FAKE_UCP, [] {
    const UcxLibrary* const library = ValueOf(UcxLibrary::Open("", FAKE_UCP_ONLY_VERSION));
    CHECK(library->path == kSystem);
    CHECK(library->version() == "1.17.3");
    CHECK(!Loaded(FAKE_UCP_ONLY_VERSION));
    CHECK(ValueOf(UcxLibrary::Open("", FAKE_UCP_ONLY_VERSION)) == library);
    CHECK(ValueOf(UcxLibrary::Open(kSystem, "")) == library);
  });
}

TEST_CASE("handlers of signals are removed unless the program had loaded UCX before") {
  WithSystem(FAKE_UCP, [] {
    ValueOf(UcxLibrary::Open("", ""));
    CHECK(DisabledSignals(kSystem) == 1);
    ValueOf(UcxLibrary::Open("", ""));
    CHECK(DisabledSignals(kSystem) == 1);
  });
  WithSystem(FAKE_UCP, [] {
    CHECK(dlopen(FAKE_UCP, RTLD_NOW | RTLD_LOCAL));
    ValueOf(UcxLibrary::Open("", ""));
    CHECK(DisabledSignals(kSystem) == 0);
  });
}

TEST_CASE("the symbols of UCX stay out of the program's namespace, and a named library is opened once") {
  WithSystem("", [] {
    const UcxLibrary* const library = ValueOf(UcxLibrary::Open(FAKE_UCP, ""));
    CHECK(library->path == FAKE_UCP);
    CHECK(dlsym(RTLD_DEFAULT, "ucp_request_free") == nullptr);
    CHECK(ValueOf(UcxLibrary::Open(FAKE_UCP, "")) == library);
  });
}

TEST_CASE("the fallback is opened if the system has no library") {
  WithSystem("", [] {
    const UcxLibrary* const library = ValueOf(UcxLibrary::Open("", FAKE_UCP));
    CHECK(library->path == FAKE_UCP);
    CHECK(ValueOf(UcxLibrary::Open("", FAKE_UCP)) == library);
  });
}

// A system library that is too old stays loaded, so its components would be used by the fallback.
TEST_CASE("a system library that is too old blocks the fallback, and the error says how to name it") {
  WithSystem(FAKE_UCP, [] {
    SetVersion("1", "14");
    CHECK(ErrorOf("", FAKE_UCP_ONLY_VERSION) ==
          "libucp.so.0 is UCX 1.14.3, but jaxcomm needs 1.15 or later of the same major version. Set "
          "JAXCOMM_UCX_LIBRARY=" FAKE_UCP_ONLY_VERSION);
    CHECK(!Loaded(FAKE_UCP_ONLY_VERSION));
  });
  WithSystem(FAKE_UCP_WITHOUT_FREE, [] {
    CHECK(ErrorOf("", FAKE_UCP) ==
          "libucp.so.0 lacks the function ucp_request_free. Set JAXCOMM_UCX_LIBRARY=" FAKE_UCP);
    CHECK(!Loaded(FAKE_UCP));
  });
}

TEST_CASE("without a fallback, the error says what to install") {
  WithSystem(FAKE_UCP, [] {
    SetVersion("2", "15");
    CHECK(ErrorOf("", "") ==
          std::string("no usable UCX: libucp.so.0 is UCX 2.15.3, but jaxcomm needs 1.15 or later of the same major "
                      "version") +
              kInstall);
  });
}

TEST_CASE("the error lists each library that was tried") {
  WithSystem("", [] {
    const std::string error = ErrorOf("", FAKE_UCP_WITHOUT_VERSION);
    CHECK(error.rfind("no usable UCX: ", 0) == 0);
    CHECK(error.find(kSystem) != std::string::npos);
    const std::string rest =
        std::string("; " FAKE_UCP_WITHOUT_VERSION " lacks the function ucp_get_version") + kInstall;
    CHECK(error.size() > rest.size() && error.substr(error.size() - rest.size()) == rest);
  });
}

TEST_CASE("no other library is tried if the user names one") {
  WithSystem(FAKE_UCP, [] {
    CHECK(ErrorOf(FAKE_UCP_WITHOUT_VERSION, FAKE_UCP) ==
          std::string("no usable UCX: " FAKE_UCP_WITHOUT_VERSION " lacks the function ucp_get_version") + kInstall);
    CHECK(!Loaded(kSystem) && !Loaded(FAKE_UCP));
  });
}

// The versions 1.15 and later are accepted, and a refused library is tried again.
TEST_CASE("UCX older than 1.15 or of another major version is refused") {
  WithSystem("", [] {
    const auto refused = [](const char* major, const char* minor) {
      SetVersion(major, minor);
      return ErrorOf(FAKE_UCP, "").find(std::string(" is UCX ") + major + "." + minor + ".3, but") != std::string::npos;
    };
    CHECK(refused("1", "14") && refused("0", "17") && refused("2", "17"));
    SetVersion("1", "15");
    CHECK(ValueOf(UcxLibrary::Open(FAKE_UCP, ""))->version() == "1.15.3");
  });
}

}  // namespace
}  // namespace jaxcomm
