#pragma once

#include "window_cache.h"

#include "write_compare.h"

#include <kvq/codec/codec.h>
#include <kvq/codec/page_codec.h>
#include <kvq/codec/row_codec.h>
#include <kvq/core/dtype.h>
#include <kvq/plan/layer_pages.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <map>
#include <set>
#include <string>
#include <vector>

/// Expected contents of a cache with exact windows after steps, hits and tokens taken back, from the codec alone.
namespace kvq::test {

/// The expected result of plan_step, from the text of pages.md alone: one position after the other.
inline StepResult expected_step(const StepCase& c) {
  StepResult r;
  const auto rows = static_cast<std::size_t>(c.num_tokens);
  r.slot_mapping.assign(rows, -1), r.window_mapping.assign(rows, -1);
  for (std::size_t b = 0; b < c.seq_lens.size(); ++b) {
    const int first = c.token_indptr[b], n = c.token_indptr[b + 1] - first, length = c.seq_lens[b];
    for (int p = length - n; p < length; ++p) {
      const auto row = static_cast<std::size_t>(first + p - (length - n));
      r.slot_mapping[row] =
          std::int64_t{c.page_tables[b][static_cast<std::size_t>(p / c.page_size)]} * c.page_size + p % c.page_size;
      if (p < c.sink_tokens && c.sink_slots[b] >= 0)
        r.window_mapping[row] = kSinkRow + std::int64_t{c.sink_slots[b]} * c.sink_rows() + p;
      else if (c.ring_slots[b] >= 0 && p >= std::max(length - c.ring_rows, c.exact_from[b]))
        r.window_mapping[row] = std::int64_t{c.ring_slots[b]} * c.ring_rows + p % c.ring_rows;
    }
  }
  return r;
}

/// The first difference, in words.
inline std::string difference(const StepResult& expected, const StepResult& found) {
  const auto first = [](const char* name, const auto& a, const auto& b) -> std::string {
    if (a.size() != b.size()) return std::string(name) + " has " + std::to_string(b.size()) + " entries";
    for (std::size_t i = 0; i < a.size(); ++i)
      if (a[i] != b[i])
        return std::string(name) + "[" + std::to_string(i) + "]: expected " + std::to_string(a[i]) + ", found " +
               std::to_string(b[i]);
    return "";
  };
  if (found.fault.claimed != expected.fault.claimed || found.fault.code != expected.fault.code)
    return "expected fault " + std::to_string(expected.fault.code) + ", found " + std::to_string(found.fault.code);
  const std::string slots = first("slot_mapping", expected.slot_mapping, found.slot_mapping);
  return slots.empty() ? first("window_mapping", expected.window_mapping, found.window_mapping) : slots;
}

/// Tokens with names from here on consist of the largest finite numbers, of both signs.
inline constexpr std::uint64_t kHuge = std::uint64_t{1} << 50;

/// One 16-bit number of a token's row, by the token's name.
inline std::uint16_t bits_of(std::uint64_t token, int layer, int head, int side, int channel, bool bf16) {
  if (token >= kHuge) return static_cast<std::uint16_t>((bf16 ? 0x7F7F : 0x7BFF) | (channel % 2 ? 0x8000 : 0));
  std::uint64_t x = ((((token * 64 + static_cast<unsigned>(layer)) * 64 + static_cast<unsigned>(head)) * 2 +
                      static_cast<unsigned>(side)) *
                         1024 +
                     static_cast<unsigned>(channel)) *
                    0x9E3779B97F4A7C15u;
  float sum = 0.0f;
  for (int i = 0; i < 4; ++i) {
    x ^= x >> 31, x *= 0x7fb5d329728ea185u, x ^= x >> 27;
    sum += static_cast<float>(x & 0xFFFF) / 65536.0f - 0.5f;
  }
  return to_16_bits(1.7f * sum, bf16);
}

/// Drives a cache and tracks its expected contents.
class WindowModel {
 public:
  WindowModel(const WindowCase& c, unsigned name_seed) : c_(c), cache_(c), next_(std::uint64_t{name_seed} << 20) {
    tokens_.resize(c.step.page_tables.size());
    for (std::size_t b = 0; b < tokens_.size(); ++b)
      slots_.push_back({c.step.sink_slots[b], c.step.ring_slots[b], c.step.exact_from[b]});
    rings_used_ = {c.step.ring_slots.begin(), c.step.ring_slots.end()};
    for (const Side side : kSides) {
      const int dim = (side == Side::v ? c.write->v : c.write->k).head_dim;
      TensorPlan& plan = plans_[index(side)];
      plan = cache_plan(c, side);
      for (int head = 0; head < c.num_kv_heads; ++head) codecs_[index(side)].emplace_back(plan, head, dim);
    }
  }

  int length(std::size_t b) const { return static_cast<int>(tokens_[b].size()); }
  WindowCache& cache() { return cache_; }
  void take_back(std::size_t b, int n) { tokens_[b].resize(tokens_[b].size() - static_cast<std::size_t>(n)); }
  /// A sequence goes on as another one that begins with its pages: a hit in a prefix cache. Its new ring is poisoned.
  /// @param sinks  it shares the sink slot, else it has none
  void hit(std::size_t b, int ring_slot, bool sinks) {
    slots_.at(b) = {sinks ? slots_[b].sink : -1, ring_slot, length(b)};
    rings_used_.insert(ring_slot);
    cache_.set_slots(b, slots_[b].sink, slots_[b].ring, slots_[b].exact_from, 5000 + next_);
    for (Token& token : tokens_[b])
      for (auto& [key, row] : token.rows) row.window.clear();  // pages and sinks stay, the ring is another one
  }
  /// Names of the next tokens; equal names mean equal rows.
  std::uint64_t next() { return next_++; }

  void step(const std::vector<int>& new_tokens, bool tight = true) {
    std::vector<std::vector<std::uint64_t>> names;
    for (const int n : new_tokens) {
      names.emplace_back();
      for (int i = 0; i < n; ++i) names.back().push_back(next());
    }
    step_named(names, tight);
  }
  void step_named(const std::vector<std::vector<std::uint64_t>>& names, bool tight = true) {
    std::vector<int> lengths, counts;
    std::vector<std::uint64_t> all;
    for (std::size_t b = 0; b < names.size(); ++b) {
      const int before = length(b), after = before + static_cast<int>(names[b].size());
      for (const std::uint64_t name : names[b]) tokens_[b].push_back({.name = name, .rows = {}}), all.push_back(name);
      lengths.push_back(after), counts.push_back(static_cast<int>(names[b].size()));
    }
    std::vector<std::vector<std::uint16_t>> rows[2];
    for (int side = 0; side < 2; ++side)
      for (int layer = 0; layer < c_.num_layers; ++layer) {
        rows[side].emplace_back();
        for (const std::uint64_t name : all)
          for (int head = 0; head < c_.num_kv_heads; ++head)
            for (int i = 0; i < c_.write->k.head_dim; ++i)
              rows[side].back().push_back(bits_of(name, layer, head, side, i, c_.write->bf16));
      }
    cache_.step(lengths, counts, rows, tight);
  }

  /// The first fault of the cache; empty if there is none.
  std::string fault() {
    const std::string planned = difference(expected_step(cache_.asked()), cache_.planned());
    if (!planned.empty()) return planned;
    if (cache_.fault().claimed) return "fault " + std::to_string(cache_.fault().code);
    for (int layer = 0; layer < c_.num_layers; ++layer) {
      const Pools pools{cache_.pages(layer), cache_.sinks(layer), cache_.rings(layer)};
      const std::string stray = written_elsewhere(pools);
      if (!stray.empty()) return stray;
      for (std::size_t b = 0; b < tokens_.size(); ++b)
        for (int p = 0; p < length(b); ++p)
          for (const Side side : kSides)
            for (int head = 0; head < c_.num_kv_heads; ++head) {
              const std::string wrong = row_fault(pools, layer, b, p, side, head);
              if (!wrong.empty())
                return "layer " + std::to_string(layer) + " sequence " + std::to_string(b) + " of " +
                       std::to_string(length(b)) + " position " + std::to_string(p) + " head " + std::to_string(head) +
                       (side == Side::k ? " k: " : " v: ") + wrong;
            }
      if (!c_.decode) continue;
      const DecodeResult result = cache_.decoded(layer);
      if (!(result.error <= 2.0 * result.plain_error + 1e-6))
        return "layer " + std::to_string(layer) + ": decode's error is " + std::to_string(result.error) +
               ", that of plain loops " + std::to_string(result.plain_error);
    }
    return "";
  }

  /// All visible rows (exact numbers, or codes with scales and minima), and decode's result.
  std::vector<float> visible() const {
    std::vector<float> all;
    for (int layer = 0; layer < c_.num_layers; ++layer) {
      const Pools pools{cache_.pages(layer), cache_.sinks(layer), cache_.rings(layer)};
      for (std::size_t b = 0; b < tokens_.size(); ++b)
        for (int p = 0; p < length(b); ++p)
          for (const Side side : kSides)
            for (int head = 0; head < c_.num_kv_heads; ++head) {
              for (const Found& found : {find_coded(pools, b, p, side, head), find_exact(pools, b, p, side, head)}) {
                all.insert(all.end(), found.row.begin(), found.row.end());
                all.insert(all.end(), found.codes.begin(), found.codes.end());
                all.insert(all.end(), found.numbers.begin(), found.numbers.end());
              }
            }
      if (!c_.decode) continue;
      const DecodeResult result = cache_.decoded(layer);
      all.insert(all.end(), result.out.begin(), result.out.end());
    }
    return all;
  }

  int codes() const { return codes_; }
  int differing() const { return differing_; }
  int seen_exact() const { return seen_exact_; }

 private:
  /// A token of a sequence, and the expected contents of its rows.
  struct Token {
    std::uint64_t name = 0;
    /// By layer, side, head.
    struct Row {
      std::vector<float> rotated;  ///< x_rot
      double size = 0.0;           ///< term_size()
      std::vector<float> window;   ///< row that was found in the windows
      std::vector<std::uint8_t> codes;
      std::vector<float> numbers;
    };
    std::map<std::array<int, 3>, Row> rows;
  };

  struct Pools {
    std::vector<std::byte> pages, sinks, rings;
  };
  struct Found {
    std::vector<float> row;  ///< exact rows, of windows or pages
    std::vector<std::uint8_t> codes;
    std::vector<float> numbers;
  };

  bool rotated() const { return c_.order > 1 || !c_.matrix.empty(); }
  /// Rounding error of a transform in two 16-bit parts.
  float rounding(const Token::Row& row) const {
    return c_.inverse.empty() ? 0.0f : static_cast<float>(0x1p-16 * row.size);
  }
  /// Where a position's exact row is to be found: the text of pages.md.
  enum class Source { sinks, ring, pages };
  Source source_of(std::size_t b, int p) const {
    const Slots& s = slots_[b];
    if (p < c_.step.sink_tokens && s.sink >= 0) return Source::sinks;
    const bool recent =
        c_.step.recent_tokens > 0 && s.ring >= 0 && p >= std::max(length(b) - c_.step.recent_tokens, s.exact_from);
    return recent ? Source::ring : Source::pages;
  }
  /// The exact row of a position; empty if it has none.
  Found find_exact(const Pools& pools, std::size_t b, int p, Side which, int head) const {
    const Source source = source_of(b, p);
    Found found;
    if (source == Source::pages) return found;
    const bool sink = source == Source::sinks;
    const WindowLayout layout = sink ? cache_.sink_layout() : cache_.ring_layout();
    const auto bytes = static_cast<std::size_t>(layout.slot_bytes()),
               slot = static_cast<std::size_t>(sink ? slots_[b].sink : slots_[b].ring);
    found.row.resize(static_cast<std::size_t>((which == Side::v ? c_.write->v : c_.write->k).head_dim));
    load_window_row(layout, which, head, p % layout.rows,
                    std::span(sink ? pools.sinks : pools.rings).subspan(slot * bytes, bytes), found.row);
    return found;
  }
  /// A position's row in its page.
  Found find_coded(const Pools& pools, std::size_t b, int p, Side which, int head) const {
    const bool v = which == Side::v;
    const TileSide& side = v ? c_.write->v : c_.write->k;
    const auto dim = static_cast<std::size_t>(side.head_dim);
    Found found;
    const PageLayout layout = cache_.page_layout();
    const int page = c_.step.page_tables[b][static_cast<std::size_t>(p / c_.step.page_size)],
              slot = p % c_.step.page_size;
    const auto bytes = std::span(pools.pages)
                           .subspan(static_cast<std::size_t>(page * cache_.page_stride()),
                                    static_cast<std::size_t>(layout.page_bytes()));
    if (side.exact()) {
      found.row.resize(dim);
      load_page_row(layout, which, head, slot, bytes, found.row);
      return found;
    }
    found.codes.resize(dim), found.numbers.resize(static_cast<std::size_t>(side.groups() * side.numbers));
    load_page_row(layout, which, number_type_of(side, v ? c_.write->v_bfloat : c_.write->k_bfloat), head, slot, bytes,
                  found.codes, found.numbers);
    return found;
  }

  std::string row_fault(const Pools& pools, int layer, std::size_t b, int p, Side which, int head) {
    const bool v = which == Side::v;
    const TileSide& side = v ? c_.write->v : c_.write->k;
    const auto dim = static_cast<std::size_t>(side.head_dim);
    Token& token = tokens_[b][static_cast<std::size_t>(p)];
    Token::Row& known = token.rows[{layer, v, head}];
    if (known.rotated.empty()) {
      std::vector<float> x(dim);
      for (int i = 0; i < side.head_dim; ++i)
        x[static_cast<std::size_t>(i)] =
            from_16_bits(bits_of(token.name, layer, head, v, i, c_.write->bf16), c_.write->bf16);
      known.rotated.resize(dim);
      rotate_row(plans_[index(which)], head, x, known.rotated);
      known.size = term_size(plans_[index(which)].rotation, head, x, known.rotated);
    }
    const Found exact = find_exact(pools, b, p, which, head), found = find_coded(pools, b, p, which, head);
    for (const Found* one : {&exact, &found}) {
      if (one->row.empty()) continue;
      const std::string wrong = exact_fault(known, one->row);
      if (!wrong.empty()) return wrong;
    }
    if (!exact.row.empty()) {
      ++seen_exact_;
      if (!known.window.empty() && known.window != exact.row) return "an exact row changed";
      known.window = exact.row;
    }
    if (found.codes.empty()) return "";
    if (known.codes.empty()) {
      known.codes.resize(dim), known.numbers.resize(found.numbers.size());
      codecs_[index(which)][static_cast<std::size_t>(head)].encode(known.rotated, known.codes, known.numbers);
    }
    const auto& codes = known.codes;
    const auto& numbers = known.numbers;
    const bool same = !rotated();
    for (std::size_t i = 0; i < dim; ++i) {
      if (same && codes[i] != found.codes[i])
        return "code " + std::to_string(i) + ": expected " + std::to_string(codes[i]) + ", found " +
               std::to_string(found.codes[i]);
      if (std::abs(codes[i] - found.codes[i]) > 1) return "code " + std::to_string(i) + " is far off";
      if (!same) ++codes_, differing_ += codes[i] != found.codes[i];
    }
    for (std::size_t i = 0; i < numbers.size(); ++i)
      if (same ? numbers[i] != found.numbers[i]
               : std::abs(numbers[i] - found.numbers[i]) >
                     (side.numbers == 1 ? 0.06f : 0.01f) * std::abs(numbers[i]) + 1e-3f + rounding(known))
        return "number " + std::to_string(i) + ": expected " + std::to_string(numbers[i]) + ", found " +
               std::to_string(found.numbers[i]);
    return "";
  }

  /// Compares an exact row with x_rot. The codec sums in another order, so that a rotated row may be rounded to the
  /// other neighboring number.
  std::string exact_fault(const Token::Row& known, const std::vector<float>& found) const {
    const float tolerance = rotated() ? 1.0f / 128.0f : 0.0f, floor = rotated() ? 1e-4f + rounding(known) : 0.0f;
    for (std::size_t i = 0; i < found.size(); ++i) {
      const float expected = bf16_to_float(float_to_bf16(known.rotated[i]));
      if (!(std::abs(found[i] - expected) <= tolerance * std::abs(expected) + floor) &&
          !(std::isnan(expected) && std::isnan(found[i])))
        return "channel " + std::to_string(i) + ": expected " + std::to_string(expected) + ", found " +
               std::to_string(found[i]);
    }
    return "";
  }

  /// Checks that pages and slots of no sequence, and bytes between pages, keep their values.
  std::string written_elsewhere(const Pools& pools) const {
    std::vector<bool> used(static_cast<std::size_t>(c_.step.num_pages));
    for (const auto& table : c_.step.page_tables)
      for (const int page : table) used[static_cast<std::size_t>(page)] = true;
    const auto untouched = [](auto begin, auto end) {
      return std::all_of(begin, end, [](std::byte x) { return x == std::byte{0xFF}; });
    };
    for (int page = 0; page < c_.step.num_pages; ++page) {
      const auto begin = pools.pages.begin() + page * cache_.page_stride();
      const auto first = used[static_cast<std::size_t>(page)] ? begin + cache_.page_layout().page_bytes() : begin;
      if (!untouched(first, begin + cache_.page_stride())) return "page " + std::to_string(page) + " was written to";
    }
    const auto slots_fault = [&](const char* name, const std::vector<std::byte>& pool, const WindowLayout& layout,
                                 const std::set<int>& taken) -> std::string {
      for (int slot = 0; slot < c_.step.num_slots; ++slot)
        if (!taken.count(slot) &&
            !untouched(pool.begin() + slot * layout.slot_bytes(), pool.begin() + (slot + 1) * layout.slot_bytes()))
          return std::string(name) + " slot " + std::to_string(slot) + " was written to";
      return "";
    };
    const std::set<int> sinks(c_.step.sink_slots.begin(), c_.step.sink_slots.end());
    const std::string wrong = slots_fault("sink", pools.sinks, cache_.sink_layout(), sinks);
    return wrong.empty() ? slots_fault("ring", pools.rings, cache_.ring_layout(), rings_used_) : wrong;
  }

  /// Of a sequence.
  struct Slots {
    int sink = -1, ring = -1, exact_from = 0;
  };
  WindowCase c_;
  WindowCache cache_;
  std::uint64_t next_;
  std::vector<std::vector<Token>> tokens_;
  TensorPlan plans_[2];
  std::vector<RowCodec> codecs_[2];
  std::vector<Slots> slots_;
  std::set<int> rings_used_;
  int codes_ = 0, differing_ = 0, seen_exact_ = 0;
};

}  // namespace kvq::test
