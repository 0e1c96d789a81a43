// Status and StatusOr: success, codes and texts of errors, and values that are moved.
#include <memory>
#include <string>

#include "../../ffi/common/status.h"
#include "../check.h"

namespace jaxcomm {
namespace {

StatusOr<std::unique_ptr<int>> Make(int value) {
  if (value < 0) return InvalidArgumentError("negative");
  return std::make_unique<int>(value);
}

TEST_CASE("a status is success, or has a code and a text") {
  CHECK(OkStatus().ok() && OkStatus().message().empty() && OkStatus().code() == StatusCode::kOk);
  for (const auto& [status, code] : {std::pair(InvalidArgumentError("text"), StatusCode::kInvalidArgument),
                                     {DeadlineExceededError("text"), StatusCode::kDeadlineExceeded},
                                     {UnavailableError("text"), StatusCode::kUnavailable}}) {
    CHECK(!status.ok() && status.code() == code && status.message() == "text");
    const Status longer = WithPrefix("prefix: ", status);
    CHECK(longer.code() == code && longer.message() == "prefix: text");
  }
  CHECK(WithPrefix("prefix: ", OkStatus()).ok());
  CHECK(WithPrefix("prefix: ", OkStatus()).message().empty());
}

TEST_CASE("a StatusOr has a value, which can be moved out, or an error") {
  StatusOr<std::unique_ptr<int>> made = Make(3);
  CHECK(made.ok() && made.status().ok() && **made == 3);
  const std::unique_ptr<int> moved = *std::move(made);
  CHECK(*moved == 3);
  const StatusOr<std::unique_ptr<int>> refused = Make(-1);
  CHECK(!refused.ok() && refused.status().message() == "negative");
  const StatusOr<std::string> text = std::string("abc");
  CHECK(text->size() == 3);
}

TEST_CASE("JAXCOMM_RETURN_IF_ERROR returns the first error and ignores success") {
  int calls = 0;
  const auto step = [&](Status status) {
    ++calls;
    return status;
  };
  const auto run = [&](const Status& first) -> Status {
    JAXCOMM_RETURN_IF_ERROR(step(first));
    JAXCOMM_RETURN_IF_ERROR(step(OkStatus()));
    return UnavailableError("the end");
  };
  CHECK(run(OkStatus()).message() == "the end" && calls == 2);
  CHECK(run(InvalidArgumentError("first")).message() == "first" && calls == 3);
}

}  // namespace
}  // namespace jaxcomm
