#include "cpu/copy.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <vector>

#include "transport/node.h"

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

namespace jaxcomm {
namespace {

template <int kBytes>
void CopyRows(char* dst, int64_t dst_stride, const char* src, int64_t src_stride, int64_t rows) {
  for (int64_t i = 0; i < rows; ++i) std::memcpy(dst + i * dst_stride, src + i * src_stride, kBytes);
}

// A fixed size lets the compiler use one load and one store per row. Returns false if the size is none of kBytes.
template <int... kBytes>
bool CopyRowsOf(char* dst, int64_t dst_stride, const char* src, int64_t src_stride, int64_t row_bytes, int64_t rows) {
  return ((row_bytes == kBytes && (CopyRows<kBytes>(dst, dst_stride, src, src_stride, rows), true)) || ...);
}

void CopyRows(char* dst, int64_t dst_stride, const char* src, int64_t src_stride, int64_t row_bytes, int64_t rows) {
  if (CopyRowsOf<1, 2, 4, 8, 16, 32, 64>(dst, dst_stride, src, src_stride, row_bytes, rows)) return;
  for (int64_t i = 0; i < rows; ++i) {
    std::memcpy(dst + i * dst_stride, src + i * src_stride, static_cast<size_t>(row_bytes));
  }
}

bool CopyFromProcess(int32_t pid, Cursor to, Cursor from, int64_t bytes) {
  constexpr size_t kBatch = 256;
  constexpr int64_t kMaxReadBytes = 1 << 30;
  std::vector<RemoteRead> reads;
  while (bytes > 0) {
    const int64_t part_bytes = std::min({bytes, to.left_bytes(), from.left_bytes(), kMaxReadBytes});
    reads.push_back({to.at(), from.at(), part_bytes});
    to.Advance(part_bytes);
    from.Advance(part_bytes);
    bytes -= part_bytes;
    if (bytes > 0 && reads.size() < kBatch && part_bytes < kMaxReadBytes) continue;
    if (!ReadFromProcess(pid, reads.data(), static_cast<int>(reads.size()))) return false;
    reads.clear();
  }
  return true;
}

}  // namespace

Cursor::Cursor(const View& view, int64_t offset, int64_t item_bytes)
    : base_(view.base), cells_(view.cells), item_bytes_(item_bytes) {
  if (cells_ != nullptr) {  // `block_` is the number of the cell
    if (cells_->empty()) return;
    const auto after = std::upper_bound(cells_->begin(), cells_->end(), offset,
                                        [](int64_t at, const Cell& cell) { return at < cell.offset; });
    const Cell& cell = *(after - 1);
    const int64_t element = offset - cell.offset;
    EnterCell(after - 1 - cells_->begin(), element / cell.run, element % cell.run * item_bytes);
    return;
  }
  const BlockLayout& layout = view.layout;
  if (layout.contiguous()) {  // one fragment that never ends
    num_blocks_ = fragments_per_block_ = 1;
    fragment_bytes_ = stride_bytes_ = std::numeric_limits<int64_t>::max() / 2;
    at_ = base_ + offset * item_bytes;
    left_bytes_ = fragment_bytes_;
    return;
  }
  num_blocks_ = layout.num_blocks;
  fragments_per_block_ = layout.block_count / layout.contiguous_count;
  fragment_bytes_ = layout.contiguous_count * item_bytes;
  stride_bytes_ = num_blocks_ * fragment_bytes_;
  const int64_t element = offset % layout.block_count;
  Enter(offset / layout.block_count, element / layout.contiguous_count, element % layout.contiguous_count * item_bytes);
}

// From `fragment` of `cell`, which may be the one behind the last: the first of the next cell, if there is one.
void Cursor::EnterCell(int64_t cell, int64_t fragment, int64_t within_bytes) {
  if (fragment * (*cells_)[static_cast<size_t>(cell)].run == (*cells_)[static_cast<size_t>(cell)].count) {
    if (cell + 1 == static_cast<int64_t>(cells_->size())) return;  // the end of the box
    ++cell;
    fragment = 0;
  }
  const Cell& entered = (*cells_)[static_cast<size_t>(cell)];
  block_ = cell;
  fragment_ = fragment;
  fragments_per_block_ = entered.rows.back().size;
  fragment_bytes_ = entered.run * item_bytes_;
  stride_bytes_ = entered.rows.back().stride * item_bytes_;
  int64_t element = entered.memory;
  for (size_t i = entered.rows.size(); i-- > 0; fragment /= entered.rows[i].size) {
    element += fragment % entered.rows[i].size * entered.rows[i].stride;
  }
  at_ = base_ + element * item_bytes_ + within_bytes;
  left_bytes_ = fragment_bytes_ - within_bytes;
}

void Cursor::Enter(int64_t block, int64_t fragment, int64_t within_bytes) {
  if (cells_ != nullptr) return EnterCell(block, fragment, within_bytes);
  block_ = block + fragment / fragments_per_block_;
  fragment_ = fragment % fragments_per_block_;
  at_ = base_ + fragment_ * stride_bytes_ + block_ * fragment_bytes_ + within_bytes;
  left_bytes_ = fragment_bytes_ - within_bytes;
}

int64_t Cursor::fragments_left() const {
  return left_bytes_ == fragment_bytes_ ? fragments_per_block_ - fragment_ % fragments_per_block_ : 0;
}

void Cursor::Advance(int64_t bytes) {
  at_ += bytes;
  left_bytes_ -= bytes;
  if (left_bytes_ == 0) Enter(block_, fragment_ + 1, 0);
}

void Cursor::AdvanceFragments(int64_t fragments) { Enter(block_, fragment_ + fragments, 0); }

void StreamBytes(char* dst, const char* src, int64_t bytes) {
#if defined(__x86_64__)
  if (bytes >= 64) {
    const int64_t head = -reinterpret_cast<intptr_t>(dst) & 63;
    std::memcpy(dst, src, static_cast<size_t>(head));
    const int64_t body_end = head + (bytes - head) / 64 * 64;
    for (int64_t i = head; i < body_end; i += 64) {
      const auto* from = reinterpret_cast<const __m128i*>(src + i);
      auto* to = reinterpret_cast<__m128i*>(dst + i);
      const __m128i a = _mm_loadu_si128(from), b = _mm_loadu_si128(from + 1);
      const __m128i c = _mm_loadu_si128(from + 2), d = _mm_loadu_si128(from + 3);
      _mm_stream_si128(to, a);
      _mm_stream_si128(to + 1, b);
      _mm_stream_si128(to + 2, c);
      _mm_stream_si128(to + 3, d);
    }
    std::memcpy(dst + body_end, src + body_end, static_cast<size_t>(bytes - body_end));
    return;
  }
#endif
  std::memcpy(dst, src, static_cast<size_t>(bytes));
}

void StreamZeros(char* dst, int64_t bytes) {
#if defined(__x86_64__)
  if (bytes >= 64) {
    const int64_t head = -reinterpret_cast<intptr_t>(dst) & 63;
    std::memset(dst, 0, static_cast<size_t>(head));
    const int64_t body_end = head + (bytes - head) / 64 * 64;
    const __m128i zero = _mm_setzero_si128();
    for (int64_t i = head; i < body_end; i += 16) _mm_stream_si128(reinterpret_cast<__m128i*>(dst + i), zero);
    std::memset(dst + body_end, 0, static_cast<size_t>(bytes - body_end));
    return;
  }
#endif
  std::memset(dst, 0, static_cast<size_t>(bytes));
}

void StreamFence() {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

void CopyBytes(char* dst, const char* src, int64_t bytes, bool stream) {
  constexpr int64_t kSmallestStream = 4096;  // for less, the fence costs more than the write-allocate traffic
  if (!stream || bytes < kSmallestStream) {
    std::memcpy(dst, src, static_cast<size_t>(bytes));
    return;
  }
  StreamBytes(dst, src, bytes);
  StreamFence();
}

bool CopyElements(const View& dst, int64_t dst_offset, const View& src, int64_t src_offset, int64_t count,
                  int64_t item_bytes, bool stream) {
  Cursor to(dst, dst_offset, item_bytes);
  Cursor from(src, src_offset, item_bytes);
  if (src.pid != 0) return CopyFromProcess(src.pid, to, from, count * item_bytes);
  for (int64_t bytes = count * item_bytes; bytes > 0;) {
    // Short fragments on one side and a long one on the other: rows of equal size, without bookkeeping per fragment.
    Cursor& shorter = to.fragment_bytes() < from.fragment_bytes() ? to : from;
    Cursor& longer = &shorter == &to ? from : to;
    const int64_t row_bytes = shorter.fragment_bytes();
    const int64_t rows = std::min(shorter.fragments_left(), std::min(longer.left_bytes(), bytes) / row_bytes);
    if (rows > 1) {
      const int64_t to_stride = &shorter == &to ? to.stride_bytes() : row_bytes;
      const int64_t from_stride = &shorter == &to ? row_bytes : from.stride_bytes();
      CopyRows(to.at(), to_stride, from.at(), from_stride, row_bytes, rows);
      shorter.AdvanceFragments(rows);
      longer.Advance(rows * row_bytes);
      bytes -= rows * row_bytes;
      continue;
    }
    const int64_t part_bytes = std::min(bytes, std::min(to.left_bytes(), from.left_bytes()));
    CopyBytes(to.at(), from.at(), part_bytes, stream);
    to.Advance(part_bytes);
    from.Advance(part_bytes);
    bytes -= part_bytes;
  }
  return true;
}

void ZeroElements(const View& dst, int64_t offset, int64_t count, int64_t item_bytes) {
  Cursor to(dst, offset, item_bytes);
  for (int64_t bytes = count * item_bytes; bytes > 0;) {
    const int64_t part_bytes = std::min(bytes, to.left_bytes());
    std::memset(to.at(), 0, static_cast<size_t>(part_bytes));
    to.Advance(part_bytes);
    bytes -= part_bytes;
  }
}

}  // namespace jaxcomm
