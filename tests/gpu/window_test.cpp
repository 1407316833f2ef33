#include "generic_formats.h"
#include "window_model.h"

#include "support/transforms.h"

#include <catch2/catch.hpp>

#include <algorithm>
#include <array>
#include <numeric>
#include <random>
#include <string>
#include <vector>

using namespace kvq;
using namespace kvq::test;

namespace {

/// Three sequences with shuffled pages and slots, for one write variant and the matching decode variant. The third one
/// has no sink slot if the seed is a multiple of 4.
WindowCase cache_case(const WriteVariant& write, int page_size, int sinks, int recent, int rollback, unsigned seed) {
  WindowCase c;
  c.write = &write;
  c.decode = find_decode_variant({write.k, write.v, write.k_bfloat, write.v_bfloat, c.heads, write.bf16});
  c.rule_k = write.k.numbers == 2 ? ScaleRule::minmax : ScaleRule::norm;
  c.rule_v = write.v.numbers == 2 ? ScaleRule::minmax : ScaleRule::norm;
  c.step.num_pages = 3 * (400 / page_size) + 2, c.step.num_slots = 12, c.max_tokens = 300;
  std::mt19937 random(seed);
  std::vector<int> pages(static_cast<std::size_t>(c.step.num_pages));
  std::iota(pages.begin(), pages.end(), 0);
  std::shuffle(pages.begin(), pages.end(), random);
  for (int b = 0; b < 3; ++b)
    c.step.page_tables.emplace_back(pages.begin() + b * (400 / page_size), pages.begin() + (b + 1) * (400 / page_size));
  c.step.csr = seed % 2;
  c.step.sink_slots = {3, 0, seed % 4 ? 2 : -1}, c.step.ring_slots = {1, 4, 0}, c.step.exact_from = {0, 0, 0};
  c.step.ids = {10, 11, 12};
  c.step.page_size = page_size, c.step.sink_tokens = sinks, c.step.recent_tokens = recent;
  c.step.max_rollback = rollback;
  c.step.ring_rows = recent > 0 ? (recent + rollback + 15) / 16 * 16 : 0;
  return c;
}

void add_centers(WindowCase& c, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  for (int i = 0; i < c.num_kv_heads * c.write->k.head_dim; ++i) c.center.push_back(normal(random));
}

/// Steps with chunks, single tokens, no tokens, and tokens taken back; checks the cache after each step.
void run_schedule(const WindowCase& c, unsigned seed, bool replayed) {
  WindowModel model(c, seed);
  std::mt19937 random(seed);
  const auto up_to = [&](int most) { return static_cast<int>(random() % static_cast<unsigned>(most + 1)); };
  model.step({5, 0, 1});
  REQUIRE(model.fault() == "");
  if (replayed) model.cache().capture();
  for (int step = 0; step < 10; ++step) {
    std::vector<int> counts;
    for (std::size_t b = 0; b < 3; ++b) {
      const int room = std::max(0, 380 - model.length(b));
      const int kind = static_cast<int>(random() % 4);
      counts.push_back(std::min(room, kind == 0 ? 0 : kind == 1 ? 1 : kind == 2 ? up_to(12) : up_to(90)));
    }
    if (step == 6) counts = {1, 1, 1};
    model.step(counts, random() % 2);
    const std::string fault = model.fault();
    CAPTURE(step, counts);
    REQUIRE(fault == "");
    if (c.step.max_rollback == 0) continue;
    for (std::size_t b = 0; b < 3; ++b) model.take_back(b, up_to(std::min(c.step.max_rollback, counts[b])));
    model.step({0, 0, 0}, random() % 2);
    REQUIRE(model.fault() == "");
    if (step % 3 == 1) model.hit(static_cast<std::size_t>(step) % 3, 5 + step / 3, step != 4);
  }
  if (c.write->k.exact()) return;
  if (c.step.recent_tokens > 0) CHECK(model.seen_exact() > 0);
  // A code may differ only if its quotient is within the rotation's rounding error of an edge.
  CHECK(static_cast<double>(model.differing()) <= 2e-3 * static_cast<double>(model.codes()));
}

void check_transformed_windows(const WriteVariant& variant, double condition, unsigned seed) {
  WindowCase c = cache_case(variant, 64, 4, 17, 4, seed);
  c.num_layers = 1;
  const int dim = variant.k.head_dim;
  if (condition > 0.0) {
    const Transform transform = random_transform(dim, condition, seed);
    c.decode = nullptr, c.matrix = transform.matrix, c.inverse = transform.inverse;
  } else {
    c.order = dim & -dim, c.scale = random_scales(c.num_kv_heads, dim, 3, seed);
    if (seed % 2) add_centers(c, seed);
  }
  run_schedule(c, seed, false);
}

}  // namespace

TEST_CASE("plan_step agrees with the text of pages.md", "[runtime][gpu]") {
  const int batch = GENERATE(1, 3, 256, 1000);
  const int sinks = GENERATE(0, 5, 64), recent = GENERATE(0, 1, 100);
  for (unsigned seed = 0; seed < 4; ++seed) {
    CAPTURE(batch, sinks, recent, seed);
    std::mt19937 random(seed + 10);
    StepCase c;
    c.page_size = seed % 2 ? 16 : 64, c.csr = seed / 2 % 2;
    c.sink_tokens = sinks, c.recent_tokens = recent, c.max_rollback = static_cast<int>(random() % 9);
    c.ring_rows = recent ? (recent + c.max_rollback + 15) / 16 * 16 : 0;
    c.token_indptr = {0};
    int page = 0;
    for (int b = 0; b < batch; ++b) {
      const unsigned kind = random() % 8;
      const int n = seed == 3   ? 1
                    : kind == 0 ? 0
                    : kind == 1 ? static_cast<int>(random() % (batch < 10 ? 1500u : 60u))
                                : static_cast<int>(random() % 3);
      const int before = kind == 2 ? 0 : static_cast<int>(random() % 300);
      c.seq_lens.push_back(before + n), c.token_indptr.push_back(c.token_indptr.back() + n);
      c.page_tables.emplace_back();
      for (int i = 0; i <= (before + n) / c.page_size; ++i) c.page_tables.back().push_back(7 * page++ % 100003);
      c.sink_slots.push_back(random() % 5 ? batch - 1 - b : -1), c.ring_slots.push_back(random() % 5 ? b : -1);
      c.exact_from.push_back(random() % 3 ? 0 : before), c.ids.push_back(static_cast<unsigned>(b) + 1);
    }
    // A ring is the sequence's if the step begins at exact_from; other rings belong to nobody yet.
    for (std::size_t b = 0; b < c.ring_slots.size(); ++b) {
      const int before = c.seq_lens[b] - (c.token_indptr[b + 1] - c.token_indptr[b]);
      if (before > c.exact_from[b]) c.ids[b] = 0;
    }
    c.num_pages = 100003, c.num_slots = batch;
    c.num_tokens = c.token_indptr.back() + (seed == 1 ? 300 : 0);
    CHECK(difference(expected_step(c), run_step_case(c)) == "");
  }
}

TEST_CASE("Steps without tokens, and rows of sequences that are not there", "[runtime][gpu]") {
  StepCase c;
  c.page_size = 16, c.sink_tokens = 4, c.recent_tokens = 8, c.ring_rows = 16;
  c.seq_lens = {30, 0}, c.token_indptr = {0, 0, 0};
  c.page_tables = {{4, 2}, {}}, c.sink_slots = {1, 0}, c.ring_slots = {0, 1}, c.exact_from = {0, 0}, c.ids = {0, 0};
  c.num_pages = 5, c.num_slots = 2;
  CHECK(difference(expected_step(c), run_step_case(c)) == "");
  c.num_tokens = 3;
  CHECK(difference(expected_step(c), run_step_case(c)) == "");
  // A padded sequence of a captured batch: length 0, no row of its own.
  c.token_indptr = {0, 1, 1};
  CHECK(difference(expected_step(c), run_step_case(c)) == "");
}

TEST_CASE("After each step of random schedules all visible tokens are what the codec says", "[runtime][gpu]") {
  const int page_size = GENERATE(16, 64);
  const bool replayed = GENERATE(false, true);
  unsigned seed = 20;
  for (const WriteVariant* variant : plain_write_variants()) {
    CAPTURE(variant->name, page_size, replayed, ++seed);
    WindowCase c = cache_case(*variant, page_size, 5, 21, 6, seed);
    if (variant->k.head_dim > 128) c.num_layers = 1;
    add_centers(c, seed);
    if (seed % 3 == 0) c.clip = {0.96, 0.9};
    run_schedule(c, seed, replayed);
  }
}

TEST_CASE("Windows of other sizes: none, sinks alone, whole tiles, longer than chunks", "[runtime][gpu]") {
  const auto [sinks, recent, rollback] = GENERATE(std::array{0, 0, 0}, std::array{16, 0, 0}, std::array{0, 1, 0},
                                                  std::array{32, 16, 16}, std::array{3, 60, 1});
  const WriteVariant& variant = *plain_write_variants()[0];
  for (const int page_size : {16, 32, 64}) {
    CAPTURE(variant.name, sinks, recent, rollback, page_size);
    WindowCase c = cache_case(variant, page_size, sinks, recent, rollback, 50);
    add_centers(c, 51);
    run_schedule(c, 52, false);
  }
}

TEST_CASE("Rotated rows, exact and coded", "[runtime][gpu]") {
  unsigned seed = 70;
  for (const WriteVariant* variant : plain_write_variants()) {
    CAPTURE(variant->name, ++seed);
    WindowCase c = cache_case(*variant, 32, 4, 17, 4, seed);
    c.num_layers = 1, c.order = variant->k.head_dim & -variant->k.head_dim;
    if (seed % 2) add_centers(c, seed);
    run_schedule(c, seed, false);
  }
}

TEST_CASE("The same of dense rotations", "[runtime][gpu]") {
  unsigned seed = 80;
  for (const WriteVariant* variant : plain_write_variants()) {
    CAPTURE(variant->name, ++seed);
    WindowCase c = cache_case(*variant, 64, 4, 17, 4, seed);
    c.num_layers = 1, c.decode = nullptr;
    const int dim = variant->k.head_dim;
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    std::vector<float> u(static_cast<std::size_t>(dim));
    for (float& x : u) x = normal(random);
    const float square = std::inner_product(u.begin(), u.end(), u.begin(), 0.0f);
    for (int i = 0; i < dim * dim; ++i)  // a reflection
      c.matrix.push_back((i / dim == i % dim ? 1.0f : 0.0f) -
                         2.0f / square * u[static_cast<std::size_t>(i / dim)] * u[static_cast<std::size_t>(i % dim)]);
    if (seed % 2) c.clip = {0.97};
    run_schedule(c, seed, false);
  }
}

TEST_CASE("The same of transforms: dense ones, and scales of channels with Hadamard blocks", "[runtime][gpu]") {
  const double condition = GENERATE(0.0, 64.0, 4000.0);  // 0: scales
  unsigned seed = 100;
  for (const WriteVariant* variant : plain_write_variants()) {
    if (variant->k.exact() || (condition > 0.0 && !variant->bf16)) continue;
    CAPTURE(variant->name, condition, ++seed);
    check_transformed_windows(*variant, condition, seed);
  }
}

TEST_CASE("The same of transforms, of one format", "[runtime][gpu][emulated]") {
  check_transformed_windows(*plain_write_variants()[0], GENERATE(0.0, 4000.0), 110);
}

TEST_CASE("The same of generic kernels: steps of random schedules in other formats", "[runtime][gpu][generic]") {
  unsigned seed = 120;
  for (const GenericFormat& format : generic_formats()) {
    ++seed;
    if (format.format.k.head_dim != format.format.v.head_dim || seed % 2) continue;
    CAPTURE(format.name, seed);
    const WriteVariant write = format.write();
    WindowCase c = cache_case(write, seed % 4 ? 16 : 64, 5, 21, 6, seed);
    c.heads = format.heads, c.num_layers = 1 + static_cast<int>(seed / 2 % 2);
    const DecodeVariant decode = format.decode();
    c.decode = &decode;
    if (seed % 3 == 0) c.order = write.k.head_dim & -write.k.head_dim;
    if (seed % 5 < 2) add_centers(c, seed);
    if (seed % 3 == 1) c.clip = {0.96, 0.9};
    run_schedule(c, seed, seed % 4 == 0);
  }
}

TEST_CASE("Rows beyond the largest bfloat16 saturate", "[runtime][gpu]") {
  for (const WriteVariant* variant : plain_write_variants()) {
    CAPTURE(variant->name);
    WindowCase c = cache_case(*variant, 16, 0, 32, 0, 88);
    c.num_layers = 1, c.decode = nullptr;
    for (int i = 0; i < c.num_kv_heads * variant->k.head_dim; ++i) c.center.push_back(i % 2 ? 1e36f : -1e36f);
    WindowModel model(c, 0);
    model.step_named({{kHuge, 1}, {2}, {kHuge}});
    CHECK(model.fault() == "");
  }
}

TEST_CASE("A cache that took tokens back is one that never saw them", "[runtime][gpu]") {
  const int recent = GENERATE(1, 5, 40);
  const int page_size = GENERATE(16, 64);
  const bool rotated = GENERATE(false, true);
  unsigned seed = 90;
  for (const WriteVariant* variant : plain_write_variants()) {
    CAPTURE(variant->name, recent, page_size, rotated, ++seed);
    constexpr int kDraft = 7;
    WindowCase c = cache_case(*variant, page_size, 3, recent, kDraft, seed);
    c.num_layers = 1;
    if (rotated) c.order = variant->k.head_dim & -variant->k.head_dim;
    add_centers(c, seed);
    WindowModel drafted(c, seed), plain(c, seed);
    std::mt19937 random(seed);
    const std::vector<int> start = {60, 2, 33};
    drafted.step(start), plain.step(start);
    REQUIRE(drafted.fault() == "");
    REQUIRE(plain.fault() == "");
    std::uint64_t rejected = std::uint64_t{1} << 40;
    for (int round = 0; round < 8; ++round) {
      std::vector<std::vector<std::uint64_t>> all(3), accepted(3);
      for (std::size_t b = 0; b < 3; ++b) {
        const unsigned keep = random() % (kDraft + 1);
        for (unsigned i = 0; i < kDraft; ++i) {
          if (i < keep) accepted[b].push_back(plain.next());
          all[b].push_back(i < keep ? accepted[b].back() : rejected++);
        }
      }
      drafted.step_named(all);
      REQUIRE(drafted.fault() == "");
      for (std::size_t b = 0; b < 3; ++b) drafted.take_back(b, static_cast<int>(kDraft - accepted[b].size()));
      drafted.step({0, 0, 0});
      plain.step_named(accepted), plain.step({0, 0, 0});
      REQUIRE(drafted.fault() == "");
      REQUIRE(plain.fault() == "");
      REQUIRE(drafted.visible() == plain.visible());
    }
  }
}
