// Channels of a call on GPUs: their number, their slices and pieces, and the machine of one of them, by definition.
#include <algorithm>

#include "../../ffi/plan/channels.h"
#include "../check.h"

namespace jaxcomm {
namespace {

TEST_CASE("every 16 KiB of a block justify a channel, an odd number of them for slices; LL takes twice the needed") {
  for (const int32_t most : {1, 2, 4, 7, 8, 32}) {
    for (int32_t size = 0; size < 600 << 10; size += 1023) {
      const int32_t channels = std::clamp(size / (16 << 10), 1, most);
      CHECK(NumChannels(size, most) == channels && NumChannels(size, 0) == 1);
      CHECK(NumSliceChannels(size, most) == (channels <= 2 || channels % 2 ? channels : channels - 1));
    }
    const int32_t limit = std::min(most, 8) * 8192;
    CHECK(FitsLl(1, most) && FitsLl(limit, most) && !FitsLl(limit + 1, most) && !FitsLl(0, most));
    for (const int32_t bytes : {1, 4096, 4097, 8192, 20000, limit}) {
      CHECK(NumLlChannels(bytes, most) == std::min({(bytes + 4095) / 4096, most, 8}));
    }
  }
}

TEST_CASE("the slices of channels cover a block, begin at 128 bytes and differ by one grain") {
  for (const int64_t item_bytes : {1, 2, 4, 8, 16, 200}) {
    const int64_t grain = std::max<int64_t>(128 / item_bytes, 1);
    for (const int64_t count : {int64_t{0}, int64_t{1}, 7 * grain, 7 * grain + 1, int64_t{12345}}) {
      for (const int32_t num_channels : {1, 2, 3, 32}) {
        int64_t next = 0, largest = 0;
        for (int32_t c = 0; c < num_channels; ++c) {
          const Range range = ChannelRange(count, item_bytes, num_channels, c);
          CHECK(range.begin == next && (next % grain == 0 || next == count) && range.count >= 0);
          next += range.count;
          largest = std::max(largest, range.count);
        }
        CHECK(next == count && largest == ChannelCount(count, item_bytes, num_channels));
        CHECK(largest <= CeilDiv(CeilDiv(count, grain), num_channels) * grain);
      }
    }
  }
  for (int64_t row_bytes = 1; row_bytes < 2560; row_bytes += 31) {
    for (const int32_t wanted : {1, 3, 8, 32}) {
      const auto [piece_bytes, channels] = PiecesOf(row_bytes, 1 << 20, wanted);
      CHECK(piece_bytes == CeilDiv(CeilDiv(row_bytes, 128), wanted) * 128);
      CHECK((channels - 1) * piece_bytes < row_bytes && row_bytes <= channels * piece_bytes && channels <= wanted);
    }
  }
}

TEST_CASE("a channel has its share of every bandwidth, and short moves at once") {
  const Machine gpu = GpuMachine(), channel = ChannelMachine(gpu, 32);
  const auto divided = [](const LinkModel& all, const LinkModel& one) {
    return one.bytes_per_s * 32 == all.bytes_per_s && one.overhead_s == all.overhead_s &&
           one.latency_s == all.latency_s;
  };
  for (size_t link = 0; link < kNumLinks; ++link) CHECK(divided(gpu.links[link], channel.links[link]));
  CHECK(divided(*gpu.ll, *channel.ll) && divided(*gpu.ll_two_shot, *channel.ll_two_shot));
  CHECK(channel.concurrent_bytes == kConcurrentBytes && channel.launch_s == gpu.launch_s && channel.arena);
}

}  // namespace
}  // namespace jaxcomm
