// Errors that are passed on.
#include <utility>

#include "../../ffi/common/status.h"
#include "../check.h"

namespace jaxcomm {
namespace {

TEST_CASE("a prefix keeps the code of an error, and makes no error of success") {
  for (const auto& [status, code] : {std::pair(InvalidArgumentError("text"), StatusCode::kInvalidArgument),
                                     {DeadlineExceededError("text"), StatusCode::kDeadlineExceeded},
                                     {UnavailableError("text"), StatusCode::kUnavailable}}) {
    const Status longer = WithPrefix("prefix: ", status);
    CHECK(!longer.ok() && longer.code() == code && longer.message() == "prefix: text");
  }
  CHECK(WithPrefix("prefix: ", OkStatus()).ok() && WithPrefix("prefix: ", OkStatus()).message().empty());
}

}  // namespace
}  // namespace jaxcomm
