#pragma once

#include "window_cache.h"

#include "write_compare.h"

#include <kvq/codec/codec.h>
#include <kvq/codec/page_codec.h>
#include <kvq/codec/row_codec.h>
#include <kvq/core/dtype.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <map>
#include <string>
#include <vector>

/// Expected contents of a cache with exact windows after steps, demotions (evictions) and tokens taken back, from the
/// codec alone.
namespace kvq::test {

/// The expected result of plan_step, from the definition of exact tokens alone: one position after the other.
inline StepResult expected_step(const StepCase& c) {
  const auto exact = [&](int p, int length) { return p < c.sink_tokens || p >= length - c.recent_tokens; };
  const auto page_slot = [&](std::size_t b, int p) {
    return std::int64_t{c.page_tables[b][static_cast<std::size_t>(p / c.page_size)]} * c.page_size + p % c.page_size;
  };
  const auto window_row = [&](std::size_t b, int p) {
    const int row = p < c.sink_tokens ? p : c.sink_rows() + (p - c.sink_tokens) % c.ring_rows;
    return std::int64_t{c.window_slots[b]} * (c.sink_rows() + c.ring_rows) + row;
  };
  StepResult r;
  const auto rows = static_cast<std::size_t>(c.num_tokens);
  r.slot_mapping.assign(rows, -1), r.window_mapping.assign(rows, -1);
  for (std::size_t b = 0; b < c.seq_lens.size(); ++b) {
    const int first = c.token_indptr[b], n = c.token_indptr[b + 1] - first, length = c.seq_lens[b], before = length - n;
    for (int p = 0; p < before; ++p)
      if (exact(p, before) && !exact(p, length))
        r.demote_from.push_back(window_row(b, p)), r.demote_to.push_back(page_slot(b, p));
    for (int p = std::max(before, 0); p < length; ++p) {
      const auto row = static_cast<std::size_t>(first + p - before);
      if (!exact(p, length)) r.slot_mapping[row] = page_slot(b, p);
      // The token may become exact again if the sequence gets shorter, by as much as the ring allows.
      bool may_be_exact = exact(p, length);
      if (c.recent_tokens > 0) may_be_exact |= exact(p, length - (c.ring_rows - c.recent_tokens));
      if (may_be_exact) r.window_mapping[row] = window_row(b, p);
    }
  }
  r.num_demotions = static_cast<int>(r.demote_from.size());
  const int most = std::min(c.num_tokens, static_cast<int>(c.seq_lens.size()) * c.recent_tokens);
  r.demote_from.resize(static_cast<std::size_t>(most), -1), r.demote_to.resize(static_cast<std::size_t>(most), -1);
  return r;
}

/// The first difference, in words.
inline std::string difference(const StepResult& expected, const StepResult& found) {
  const auto first = [](const char* name, const auto& a, const auto& b) -> std::string {
    if (a.size() != b.size()) return std::string(name) + " has " + std::to_string(b.size()) + " entries";
    for (std::size_t i = 0; i < a.size(); ++i)
      if (std::max<std::int64_t>(a[i], -1) != std::max<std::int64_t>(b[i], -1))
        return std::string(name) + "[" + std::to_string(i) + "]: expected " + std::to_string(a[i]) + ", found " +
               std::to_string(b[i]);
    return "";
  };
  if (expected.num_demotions != found.num_demotions)
    return "expected " + std::to_string(expected.num_demotions) + " demotions, found " +
           std::to_string(found.num_demotions);
  for (const std::string& line : {first("slot_mapping", expected.slot_mapping, found.slot_mapping),
                                  first("window_mapping", expected.window_mapping, found.window_mapping),
                                  first("demote_from", expected.demote_from, found.demote_from),
                                  first("demote_to", expected.demote_to, found.demote_to)})
    if (!line.empty()) return line;
  return "";
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
  WindowModel(const CacheCase& c, unsigned name_seed) : c_(c), cache_(c), next_(std::uint64_t{name_seed} << 20) {
    tokens_.resize(c.step.page_tables.size());
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
    const int recent = c_.step.recent_tokens;
    std::vector<int> lengths, counts;
    std::vector<std::uint64_t> all;
    for (std::size_t b = 0; b < names.size(); ++b) {
      const int before = length(b), after = before + static_cast<int>(names[b].size());
      for (int p = std::max(c_.step.sink_tokens, before - recent); p < std::min(before, after - recent); ++p)
        tokens_[b][static_cast<std::size_t>(p)].demoted = true;
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
    for (int layer = 0; layer < c_.num_layers; ++layer) {
      const std::vector<std::byte> pages = cache_.pages(layer), windows = cache_.windows(layer);
      const std::string stray = written_elsewhere(pages, windows);
      if (!stray.empty()) return stray;
      for (std::size_t b = 0; b < tokens_.size(); ++b)
        for (int p = 0; p < length(b); ++p)
          for (const Side side : kSides)
            for (int head = 0; head < c_.num_kv_heads; ++head) {
              const std::string wrong = row_fault(pages, windows, layer, b, p, side, head);
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
      const std::vector<std::byte> pages = cache_.pages(layer), windows = cache_.windows(layer);
      for (std::size_t b = 0; b < tokens_.size(); ++b)
        for (int p = 0; p < length(b); ++p)
          for (const Side side : kSides)
            for (int head = 0; head < c_.num_kv_heads; ++head) {
              const Found found = find(pages, windows, b, p, side, head);
              all.insert(all.end(), found.row.begin(), found.row.end());
              all.insert(all.end(), found.codes.begin(), found.codes.end());
              all.insert(all.end(), found.numbers.begin(), found.numbers.end());
            }
      if (!c_.decode) continue;
      const DecodeResult result = cache_.decoded(layer);
      all.insert(all.end(), result.out.begin(), result.out.end());
    }
    return all;
  }

  int codes() const { return codes_; }
  int differing() const { return differing_; }
  int seen_demoted() const { return seen_demoted_; }
  int seen_direct() const { return seen_direct_; }

 private:
  /// A token of a sequence, and the expected contents of its rows.
  struct Token {
    std::uint64_t name = 0;
    bool demoted = false;  ///< it was quantized from its exact rows in the window
    /// By layer, side, head.
    struct Row {
      std::vector<float> rotated;  ///< x_rot
      double size = 0.0;           ///< term_size()
      std::vector<float> window;   ///< row that was found in the windows
      std::vector<std::uint8_t> codes;
      std::vector<float> numbers;
      bool from_window = false;  ///< what the codes are made of
    };
    std::map<std::array<int, 3>, Row> rows;
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
  bool exact(std::size_t b, int p) const { return p < c_.step.sink_tokens || p >= length(b) - c_.step.recent_tokens; }
  Found find(const std::vector<std::byte>& pages, const std::vector<std::byte>& windows, std::size_t b, int p,
             Side which, int head) const {
    const bool v = which == Side::v;
    const TileSide& side = v ? c_.write->v : c_.write->k;
    const auto dim = static_cast<std::size_t>(side.head_dim);
    Found found;
    if (exact(b, p)) {
      const WindowLayout layout = cache_.window_layout();
      const auto bytes = static_cast<std::size_t>(layout.slot_bytes());
      found.row.resize(dim);
      load_window_row(layout, which, head, layout.row(p, c_.step.sink_tokens),
                      std::span(windows).subspan(static_cast<std::size_t>(c_.step.window_slots[b]) * bytes, bytes),
                      found.row);
      return found;
    }
    const PageLayout layout = cache_.page_layout();
    const int page = c_.step.page_tables[b][static_cast<std::size_t>(p / c_.step.page_size)],
              slot = p % c_.step.page_size;
    const auto bytes = std::span(pages).subspan(static_cast<std::size_t>(page * cache_.page_stride()),
                                                static_cast<std::size_t>(layout.page_bytes()));
    if (side.exact()) {
      found.row.resize(dim);
      load_page_row(layout, which, head, slot, bytes, found.row);
      return found;
    }
    found.codes.resize(dim), found.numbers.resize(static_cast<std::size_t>(side.groups() * side.numbers));
    load_page_row(layout, which, (v ? c_.write->v_bfloat : c_.write->k_bfloat) ? ScaleType::bf16 : ScaleType::fp16,
                  head, slot, bytes, found.codes, found.numbers);
    return found;
  }

  std::string row_fault(const std::vector<std::byte>& pages, const std::vector<std::byte>& windows, int layer,
                        std::size_t b, int p, Side which, int head) {
    const bool v = which == Side::v;
    const TileSide& side = v ? c_.write->v : c_.write->k;
    const auto dim = static_cast<std::size_t>(side.head_dim);
    Token& token = tokens_[b][static_cast<std::size_t>(p)];
    const Found found = find(pages, windows, b, p, which, head);
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
    if (!found.row.empty()) {
      // The codec sums in another order, so that a rotated row may be rounded to the other neighboring number.
      const float tolerance = rotated() ? 1.0f / 128.0f : 0.0f, floor = rotated() ? 1e-4f + rounding(known) : 0.0f;
      for (std::size_t i = 0; i < dim; ++i) {
        const float expected = bf16_to_float(float_to_bf16(known.rotated[i]));
        if (!(std::abs(found.row[i] - expected) <= tolerance * std::abs(expected) + floor))
          return "channel " + std::to_string(i) + ": expected " + std::to_string(expected) + ", found " +
                 std::to_string(found.row[i]);
      }
      if (!known.window.empty() && known.window != found.row) return "an exact row changed";
      known.window = found.row;
      return "";
    }
    (token.demoted ? seen_demoted_ : seen_direct_) += 1;
    if (token.demoted && known.window.empty()) return "demoted, but never seen in the windows";
    if (known.codes.empty() || known.from_window != token.demoted) {
      known.from_window = token.demoted, known.codes.resize(dim), known.numbers.resize(found.numbers.size());
      codecs_[index(which)][static_cast<std::size_t>(head)].encode(token.demoted ? known.window : known.rotated,
                                                                   known.codes, known.numbers);
    }
    const auto& codes = known.codes;
    const auto& numbers = known.numbers;
    const bool same = token.demoted || !rotated();
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

  /// Checks that pages and window slots of no sequence, and bytes between pages, keep their values.
  std::string written_elsewhere(const std::vector<std::byte>& pages, const std::vector<std::byte>& windows) const {
    std::vector<bool> used(static_cast<std::size_t>(c_.num_pages));
    for (const auto& table : c_.step.page_tables)
      for (const int page : table) used[static_cast<std::size_t>(page)] = true;
    const auto untouched = [](auto begin, auto end) {
      return std::all_of(begin, end, [](std::byte x) { return x == std::byte{0xFF}; });
    };
    for (int page = 0; page < c_.num_pages; ++page) {
      const auto begin = pages.begin() + page * cache_.page_stride();
      const auto first = used[static_cast<std::size_t>(page)] ? begin + cache_.page_layout().page_bytes() : begin;
      if (!untouched(first, begin + cache_.page_stride())) return "page " + std::to_string(page) + " was written to";
    }
    const std::int64_t slot_bytes = cache_.window_layout().slot_bytes();
    for (int slot = 0; slot < c_.num_window_slots; ++slot)
      if (std::count(c_.step.window_slots.begin(), c_.step.window_slots.end(), slot) == 0 &&
          !untouched(windows.begin() + slot * slot_bytes, windows.begin() + (slot + 1) * slot_bytes))
        return "window slot " + std::to_string(slot) + " was written to";
    return "";
  }

  CacheCase c_;
  WindowCache cache_;
  std::uint64_t next_;
  std::vector<std::vector<Token>> tokens_;
  TensorPlan plans_[2];
  std::vector<RowCodec> codecs_[2];
  int codes_ = 0, differing_ = 0, seen_demoted_ = 0, seen_direct_ = 0;
};

}  // namespace kvq::test
