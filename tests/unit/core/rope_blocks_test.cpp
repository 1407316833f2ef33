#include <kvq/core/geometry.h>

#include <catch2/catch.hpp>

#include <set>
#include <utility>
#include <vector>

using namespace kvq;
using Pairs = std::vector<std::pair<int, int>>;

namespace {

Pairs blocks_of(int head_dim, RopeLayout layout, int dim, int offset = 0) {
  LayerGeometry geometry{
      .num_q_heads = 1,
      .num_kv_heads = 1,
      .head_dim = head_dim,
      .v_head_dim = head_dim,
      .softmax_scale = 1.0,
  };
  geometry.rope = {
      .layout = layout,
      .dim = dim,
      .offset = offset,
      .inv_freq = std::vector<double>(static_cast<std::size_t>(dim / 2), 1.0),
  };
  Pairs pairs;
  for (const RopeBlock& block : rope_blocks(geometry)) pairs.emplace_back(block.first, block.second);
  return pairs;
}

}  // namespace

TEST_CASE("Blocks of a head that rotates whole are its frequencies, in their order", "[core][rope]") {
  CHECK(blocks_of(8, RopeLayout::half, 8) == Pairs{{0, 4}, {1, 5}, {2, 6}, {3, 7}});
  CHECK(blocks_of(8, RopeLayout::interleaved, 8) == Pairs{{0, 1}, {2, 3}, {4, 5}, {6, 7}});
  CHECK(blocks_of(2, RopeLayout::half, 2) == Pairs{{0, 1}});
}

TEST_CASE("Channels beside a partial rotary slice follow in neighboring pairs, ascending", "[core][rope]") {
  CHECK(blocks_of(10, RopeLayout::half, 4) == Pairs{{0, 2}, {1, 3}, {4, 5}, {6, 7}, {8, 9}});
  CHECK(blocks_of(10, RopeLayout::half, 4, 6) == Pairs{{6, 8}, {7, 9}, {0, 1}, {2, 3}, {4, 5}});
  CHECK(blocks_of(10, RopeLayout::interleaved, 4, 2) == Pairs{{2, 3}, {4, 5}, {0, 1}, {6, 7}, {8, 9}});
  // With an odd offset, a pair of the other channels has one channel on each side of the rotary slice.
  CHECK(blocks_of(8, RopeLayout::half, 4, 1) == Pairs{{1, 3}, {2, 4}, {0, 5}, {6, 7}});
  CHECK(blocks_of(8, RopeLayout::interleaved, 4, 3) == Pairs{{3, 4}, {5, 6}, {0, 1}, {2, 7}});
}

TEST_CASE("Without rotary channels all are neighboring pairs", "[core][rope]") {
  CHECK(blocks_of(6, RopeLayout::none, 0) == Pairs{{0, 1}, {2, 3}, {4, 5}});
  CHECK(blocks_of(1, RopeLayout::none, 0) == Pairs{{0, -1}});
}

TEST_CASE("An odd head leaves a last block of one channel", "[core][rope]") {
  CHECK(blocks_of(5, RopeLayout::none, 0) == Pairs{{0, 1}, {2, 3}, {4, -1}});
  CHECK(blocks_of(5, RopeLayout::half, 4) == Pairs{{0, 2}, {1, 3}, {4, -1}});
  CHECK(blocks_of(5, RopeLayout::half, 4, 1) == Pairs{{1, 3}, {2, 4}, {0, -1}});
  CHECK(blocks_of(7, RopeLayout::interleaved, 2, 3) == Pairs{{3, 4}, {0, 1}, {2, 5}, {6, -1}});
}

TEST_CASE("Every channel is in one block, and the number of blocks is half the channels, rounded up", "[core][rope]") {
  for (int head_dim = 1; head_dim <= 20; ++head_dim)
    for (const RopeLayout layout : {RopeLayout::none, RopeLayout::half, RopeLayout::interleaved})
      for (int dim = 0; dim <= head_dim; dim += 2)
        for (int offset = 0; offset + dim <= head_dim; ++offset) {
          if ((layout == RopeLayout::none) != (dim == 0)) continue;
          const Pairs pairs = blocks_of(head_dim, layout, dim, offset);
          std::set<int> seen;
          int singles = 0;
          for (const auto& [first, second] : pairs) {
            CHECK(seen.insert(first).second);
            if (second == -1)
              ++singles;
            else
              CHECK(seen.insert(second).second);
          }
          CHECK(pairs.size() == static_cast<std::size_t>((head_dim + 1) / 2));
          CHECK(seen.size() == static_cast<std::size_t>(head_dim));
          CHECK(*seen.begin() == 0);
          CHECK(*seen.rbegin() == head_dim - 1);
          CHECK(singles == head_dim % 2);
        }
}
