// cache_insert and cache_emit: cache pages between a program's cache and those that are pulled or offered.
#include "transfer/cache_pages.h"

#include <algorithm>
#include <memory>
#include <string>
#include <utility>

#include "common/attributes.h"
#include "common/duration.h"
#include "cpu/completion_pool.h"
#include "handlers/call.h"

namespace jaxcomm {
namespace {

constexpr size_t kNumDimensions = 5;  // kv, page, token, head, dim
constexpr size_t kPageDimension = 1;

ffi::Error ToError(const Status& status) {
  return ffi::Error(
      status.code() == StatusCode::kDeadlineExceeded ? ffi::ErrorCode::kDeadlineExceeded : ffi::ErrorCode::kInternal,
      status.message());
}

// The pages of a row-major cache whose axis order[i] is dimension i.
StatusOr<StridedArray> PagesOf(char* data, ffi::AnyBuffer cache, ffi::Span<const int64_t> order,
                               ffi::Buffer<ffi::S32> pages) {
  const auto shape = cache.dimensions();
  if (shape.size() != kNumDimensions || order.size() != kNumDimensions) {
    return InvalidArgumentError("jaxcomm.transfer: a cache must have 5 dimensions");
  }
  StridedArray array;
  array.base = data;
  array.item_bytes = static_cast<int64_t>(ffi::ByteWidth(cache.element_type()));
  for (size_t i = 0; i < kNumDimensions; ++i) {
    const auto axis = static_cast<size_t>(order[i]);
    int64_t stride = array.item_bytes;
    for (size_t inner = axis + 1; inner < kNumDimensions; ++inner) stride *= shape[inner];
    array.sizes.push_back(shape[axis]);
    array.strides.push_back(stride);
  }
  array.page_dimension = kPageDimension;
  for (size_t i = 0; i < pages.element_count(); ++i) {
    const int64_t page = pages.typed_data()[i];
    if (page < 0 || page >= array.sizes[kPageDimension]) {
      return InvalidArgumentError("jaxcomm.transfer: cache page " + std::to_string(page) + " of a cache of " +
                                  std::to_string(array.sizes[kPageDimension]));
    }
    array.pages.push_back(page);
  }
  array.sizes[kPageDimension] = static_cast<int64_t>(array.pages.size());
  return array;
}

// Copies on a thread of the pool: that of the endpoint serves others. Either all pages arrive or none.
class Insertion : public Completion {
 public:
  Insertion(ffi::Promise promise, int32_t pull, int32_t layer, StridedArray cache, bool masks_errors, int32_t* mask)
      : promise_(std::move(promise)),
        pull_(pull),
        layer_(layer),
        cache_(std::move(cache)),
        masks_errors_(masks_errors),
        mask_(mask) {}
  void Succeed() override {
    const Status status = CachePages::Get().Insert(pull_, layer_, cache_);
    if (!status.ok()) return Fail(status);
    SetMask(0);
  }
  void Fail(const Status& error) override {
    if (masks_errors_ && error.code() != StatusCode::kInvalidArgument) return SetMask(1);
    promise_.SetError(ToError(error));
  }

 private:
  void SetMask(int32_t value) {
    std::fill_n(mask_, cache_.pages.size(), value);
    promise_.SetAvailable();
  }
  ffi::Promise promise_;
  int32_t pull_;
  int32_t layer_;
  StridedArray cache_;
  bool masks_errors_;
  int32_t* mask_;  // an element per page
};

// handle: numbers of the pull and of the layer.
ffi::Future ExecuteInsert(ffi::Span<const int64_t> order, double timeout_s, bool masks_errors, ffi::AnyBuffer cache,
                          ffi::Buffer<ffi::S32> handle, ffi::Buffer<ffi::S32> pages, ffi::Result<ffi::AnyBuffer> result,
                          ffi::ResultBuffer<ffi::S32> mask) {
  if (mask->element_count() != pages.element_count()) {
    return Failed(InvalidArgumentError("jaxcomm.transfer: insert: the mask must have an element per page"));
  }
  if (result->untyped_data() != cache.untyped_data()) {
    return Failed(InvalidArgumentError("jaxcomm.transfer: insert: the result must be aliased to the cache"));
  }
  StatusOr<StridedArray> places = PagesOf(static_cast<char*>(cache.untyped_data()), cache, order, pages);
  if (!places.ok()) return Failed(places.status());
  const int32_t pull = handle.typed_data()[0], layer = handle.typed_data()[1];
  ffi::Promise promise;
  ffi::Future future(promise);
  auto item = std::make_shared<CompletionPool::Item>();
  item->completion = std::make_unique<Insertion>(std::move(promise), pull, layer, *std::move(places), masks_errors,
                                                 mask->typed_data());
  item->pace = std::make_shared<Pace>();
  const auto deadline = std::chrono::steady_clock::now() + DurationOf(timeout_s);
  CachePages::Get().WhenArrived(pull, layer, deadline, [item](const Status& status) {
    item->status = status;
    std::vector<CompletionPool::Item> items;
    items.push_back(std::move(*item));
    CompletionPool::Get().Push(std::move(items));
  });
  return future;
}

ffi::Error ExecuteEmit(ffi::Span<const int64_t> order, ffi::AnyBuffer cache, ffi::Buffer<ffi::S32> handle,
                       ffi::Buffer<ffi::S32> pages, ffi::Result<ffi::AnyBuffer> result) {
  if (result->untyped_data() != cache.untyped_data()) {
    return ffi::Error::InvalidArgument("jaxcomm.transfer: emit: the result must be aliased to the cache");
  }
  StatusOr<StridedArray> from = PagesOf(static_cast<char*>(cache.untyped_data()), cache, order, pages);
  if (!from.ok()) return ToError(from.status());
  const Status status = CachePages::Get().Emit(handle.typed_data()[0], handle.typed_data()[1], *from);
  return status.ok() ? ffi::Error::Success() : ToError(status);
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(CacheInsertExecute, ExecuteInsert,
                              ffi::Ffi::Bind()
                                  .Attr<ffi::Span<const int64_t>>("order")
                                  .Attr<double>("timeout_s")
                                  .Attr<bool>("masks_errors")
                                  .Arg<ffi::AnyBuffer>()           // cache
                                  .Arg<ffi::Buffer<ffi::S32>>()    // pull, layer
                                  .Arg<ffi::Buffer<ffi::S32>>()    // pages of the cache
                                  .Ret<ffi::AnyBuffer>()           // the cache
                                  .Ret<ffi::Buffer<ffi::S32>>());  // 1 for each page that has not arrived

XLA_FFI_DEFINE_HANDLER_SYMBOL(CacheEmitExecute, ExecuteEmit,
                              ffi::Ffi::Bind()
                                  .Attr<ffi::Span<const int64_t>>("order")
                                  .Arg<ffi::AnyBuffer>()         // cache
                                  .Arg<ffi::Buffer<ffi::S32>>()  // offer, layer
                                  .Arg<ffi::Buffer<ffi::S32>>()  // pages of the cache
                                  .Ret<ffi::AnyBuffer>());       // the cache

}  // namespace jaxcomm
