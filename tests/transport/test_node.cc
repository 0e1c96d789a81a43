// What a process shows the others of its node: its board, and the memory of its calls.
#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "../../ffi/transport/node.h"
#include "../check.h"

namespace jaxcomm {
namespace {

bool Has(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

TEST_CASE("boards keep calls and failures") {
  Node node;
  CHECK(node.Open().empty());
  Board& board = node.board();
  // Keys that want the same places: as many as there are, then none.
  int count = 0;
  for (uint64_t i = 1;; ++i, ++count) {
    const uint64_t key = i * Board::kBuckets;
    const int slot = board.Reserve(key);
    if (slot < 0) break;
    board.Publish(slot, key);
    CHECK(board.Find(key) == slot);
  }
  CHECK(count == Board::kWays * Board::kProbes);
  CHECK(board.Find(12345) < 0);
  std::string why;
  CHECK(!board.FindFailure(7, &why));
  board.AddFailure(7, "seven");
  board.AddFailure(8, std::string(5000, 'x'));
  CHECK(board.FindFailure(7, &why) && why == "seven");
  CHECK(board.FindFailure(8, &why) && why == std::string(Board::kFailureWords * 8, 'x'));
  for (int64_t run = 100; run < 100 + Board::kNumFailures; ++run) board.AddFailure(run, "later");
  CHECK(!board.FindFailure(7, &why));
}

TEST_CASE("memory is cut and used again") {
  Node node;
  CHECK(node.Open().empty());
  std::string error;
  std::vector<Block> blocks;
  for (const uint64_t bytes : {1, 4096, 4097, 100000, 5 << 20, 9 << 20, 20 << 20}) {
    for (int i = 0; i < 3; ++i) {
      Block block;
      CHECK(node.Take(bytes, &block, &error));
      CHECK(block.bytes >= bytes);
      std::fill(block.data, block.data + block.bytes, static_cast<char>(blocks.size()));
      blocks.push_back(block);
    }
  }
  for (size_t i = 0; i < blocks.size(); ++i) {
    CHECK(blocks[i].data[0] == static_cast<char>(i) && blocks[i].data[blocks[i].bytes - 1] == static_cast<char>(i));
  }
  for (const Block& block : blocks) node.Give(block);
  const uint32_t memories = node.board().num_memories.load();
  for (int i = 0; i < 1000; ++i) {
    Block block;
    CHECK(node.Take(1 + i * 1000, &block, &error));
    node.Give(block);
  }
  CHECK(node.board().num_memories.load() <= memories + 2);
}

TEST_CASE("strangers are refused") {
  Node node, other;
  std::string error;
  CHECK(node.Open().empty());
  CHECK(other.Open().empty());
  NodeAddress address = node.address();
  address.token[1] ^= 1;
  CHECK(Has(other.Connect(1, address), "not the one that was announced"));
  address = node.address();
  address.board_fd = 0;
  CHECK(!other.Connect(1, address).empty());
  address.pid = 1 << 30;
  CHECK(Has(other.Connect(1, address), "can't be found"));
  CHECK(other.Connect(1, node.address()).empty());
}

}  // namespace
}  // namespace jaxcomm
