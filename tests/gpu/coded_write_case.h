#pragma once

#include <kvq/plan/layer_pages.h>
#include <kvq/plan/layer_plan.h>

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

/// Plans of coded rows, hard rows, and a write of them that is compared with what the codec stores, byte for byte.
/// Plans go through DeviceImage, so what it uploads is tested, too.
namespace kvq::test::coded {

constexpr int kHeads = 3;
constexpr ScaleType kTypes[] = {ScaleType::fp16, ScaleType::bf16, ScaleType::fp32};
constexpr ScaleRule kSearched[] = {ScaleRule::norm, ScaleRule::least_squares, ScaleRule::rms};
constexpr ScaleRule kSymmetric[] = {ScaleRule::norm, ScaleRule::absmax, ScaleRule::least_squares};

TensorPlan uniform(int bits, int group, UniformLevels levels, ScaleRule rule, ScaleType type);
/// Codebooks of random, ascending entries. @param group  0: of all widths up to `bits`
TensorPlan codebooks(int bits, int group, bool per_head, ScaleRule rule, ScaleType type);
/// Random taps.
TrellisTaps taps(int bits, int memory, TrellisSearch search = TrellisSearch::integer);
TensorPlan trellis(std::vector<TrellisTaps> all, int bits, int group, ScaleRule rule, ScaleType type);
/// Widths that differ from head to head. @param ends  for each head the ends of the segments of width 8, 7, ..., 1
TensorPlan mixed(TensorPlan plan, int dim, std::vector<std::vector<int>> ends, bool row_scale);
/// Three heads with few, many and no segments.
std::vector<std::vector<int>> some_widths(int dim);
TensorPlan with_centroids(TensorPlan plan, int count, bool joint, int dim, float size = 1.0f);
/// Hadamard blocks of 4 with signs: exact in float32 for rows of small integers.
TensorPlan rotated(TensorPlan plan, int dim);
/// Dense rotations that permute channels and change signs: exact, too.
TensorPlan permuted(TensorPlan plan, int dim);
LayerPlan layer_of(TensorPlan k, int k_dim, TensorPlan v, int v_dim);

struct Rows {
  int tokens = 0;
  std::vector<std::uint16_t> k, v;  ///< [T, Hkv, D]
};

/// Hard rows among random ones. @param integers  only small integers
Rows random_rows(const LayerPlan& plan, int tokens, bool bf16, unsigned seed, bool integers = false);

/// Where the tokens of a write go.
struct Target {
  int page_size = 32, pages = 4;
  std::vector<std::int64_t> slots = {};
  std::vector<std::int64_t> window_rows = {};  ///< of rings, or negative; empty: no windows
  WindowLayouts windows = {};
  std::string_view chosen = {};  ///< the runtime's choice, whose name begins so; empty: the generic kernel
  int multiprocessors = 0;       ///< that the launch goes by; 0: the device's
  int round_tokens = 0;          ///< the workspace has room for; 0: no workspace
};
Target target_of(int tokens, int page_size, int first);

struct Pools {
  std::vector<std::byte> pages, rings;
};
/// Writes rows into pools, and gives them back.
Pools written_pools(const LayerPlan& plan, const PageLayout& layout, const Target& t, const Rows& rows, bool bf16,
                    Pools pools);
/// Writes rows and compares all bytes, also those that no row has.
void check_write_of(const LayerPlan& plan, Target t, const Rows& rows, bool bf16);
/// Keys and values of one plan: a whole tile and more, then single tokens at random slots. A launch for very many
/// multiprocessors gives each row of bits a block (few_rows.h), one for many gives each warp one row, and one for a
/// single multiprocessor up to four.
void check_plan(const TensorPlan& plan, int dim, bool bf16, unsigned seed);

}  // namespace kvq::test::coded
