#include <kvq/codec/codec.h>
#include <kvq/codec/page_codec.h>
#include <kvq/codec/row_codec.h>
#include <kvq/core/dtype.h>
#include <kvq/core/error.h>
#include <kvq/plan/layer_pages.h>
#include <kvq/runtime/golden_pages.h>

#include <algorithm>
#include <cmath>

namespace kvq {

namespace {

/// Distance of neighboring values of a group's codes, with scale and gain left out; of a trellis, whose values
/// interleave, that of as many evenly spaced ones.
struct UnitStep {
  bool row_scale;
  float operator()(const UniformCoder& coder) const { return row_scale ? gaussian_step(coder.bits) : 1.0f; }
  float operator()(const CodebookGroup& group) const {
    float largest = 0.0f;
    for (std::size_t i = 1; i < group.table().size(); ++i)
      largest = std::max(largest, group.table()[i] - group.table()[i - 1]);
    return largest;
  }
  float operator()(const TrellisGroup& group) const {
    const auto [least, most] = std::minmax_element(group.values().begin(), group.values().end());
    return (*most - *least) / static_cast<float>((1 << group.bits()) - 1);
  }
};

/// One side's golden rows, and access to their slots in pages.
class PagedSide {
 public:
  PagedSide(const TensorPlan& plan, const PageLayout& layout, const GoldenSide& golden, Side side)
      : layout_(layout),
        golden_(golden),
        side_(side),
        tile_(side == Side::k ? layout.k : layout.v),
        exact_(tile_.exact()),
        type_(scale_type(plan.coder)),
        row_bytes_(golden.firm.empty() ? 0 : golden.bytes.size() / golden.firm.size()),
        expected_(tile_),
        found_(expected_) {
    for (int head = 0; head < layout.num_kv_heads; ++head) {
      codecs_.emplace_back(plan, head, tile_.head_dim);
      if (tile_.is_bits()) segments_.push_back(bit_segments(plan, head, tile_.head_dim));
    }
  }

  std::size_t rows() const { return golden_.firm.size(); }

  void store(std::size_t row, std::span<std::byte> pages) {
    load_golden(row);
    const auto at = page(row, pages);
    if (exact_)
      store_page_row(layout_, side_, head(row), slot(row), expected_.values, at);
    else if (tile_.is_bits())
      store_page_row(layout_, side_, type_, head(row), slot(row), segments(row), expected_.codes, expected_.numbers,
                     at);
    else
      store_page_row(layout_, side_, type_, head(row), slot(row), expected_.codes, expected_.numbers, at);
    if (tile_.index_bytes > 0) store_page_index(layout_, side_, head(row), slot(row), expected_.index, at);
  }

  void compare(std::size_t row, std::span<const std::byte> pages, PageDifference& difference) {
    load_golden(row);
    const auto at = page(row, pages);
    if (exact_) {
      load_page_row(layout_, side_, head(row), slot(row), at, found_.values);
    } else {
      found_.numbers.resize(expected_.numbers.size());
      if (tile_.is_bits())
        load_page_row(layout_, side_, type_, head(row), slot(row), segments(row), at, found_.codes, found_.numbers);
      else
        load_page_row(layout_, side_, type_, head(row), slot(row), at, found_.codes, found_.numbers);
      codec(row).decode(found_.codes, found_.numbers, found_.values);
    }
    if (tile_.index_bytes > 0) found_.index = load_page_index(layout_, side_, head(row), slot(row), at);
    ++difference.rows;
    const bool firm = golden_.firm[row] != 0;
    difference.firm_rows += firm;
    const std::string fault = firm ? firm_fault() : soft_fault(codec(row));
    if (fault.empty()) return;
    ++(firm ? difference.firm_faults : difference.soft_faults);
    if (difference.first.empty())
      difference.first = fmt::format("{} of token {} head {}: {}", name(side_), token(row), head(row), fault);
  }

 private:
  struct Row {
    explicit Row(const TileSide& tile)
        : codes(static_cast<std::size_t>(tile.head_dim)), values(static_cast<std::size_t>(tile.head_dim)) {}
    std::vector<std::uint8_t> codes;
    std::vector<float> numbers = {};  ///< as many as the head's rows have
    std::vector<float> values;
    int index = 0;  ///< of the centroid
  };

  std::int64_t token(std::size_t row) const { return static_cast<std::int64_t>(row) / layout_.num_kv_heads; }
  int head(std::size_t row) const { return static_cast<int>(static_cast<std::int64_t>(row) % layout_.num_kv_heads); }
  int slot(std::size_t row) const { return static_cast<int>(token(row) % layout_.page_size); }
  const RowCodec& codec(std::size_t row) const { return codecs_[static_cast<std::size_t>(head(row))]; }
  std::span<const BitSegment> segments(std::size_t row) const { return segments_[static_cast<std::size_t>(head(row))]; }

  template <typename Byte>
  std::span<Byte> page(std::size_t row, std::span<Byte> pages) const {
    const auto size = static_cast<std::size_t>(layout_.page_bytes());
    return pages.subspan(static_cast<std::size_t>(token(row) / layout_.page_size) * size, size);
  }

  void load_golden(std::size_t row) {
    const auto bytes = std::as_bytes(std::span(golden_.bytes)).subspan(row * row_bytes_, row_bytes_);
    if (exact_) {
      widen(DType::bf16, bytes.data(), expected_.values.size(), expected_.values.data());
    } else {
      expected_.numbers.resize(static_cast<std::size_t>(codec(row).num_numbers()));
      expected_.index = codec(row).unpack(bytes, expected_.codes, expected_.numbers);
      codec(row).decode(expected_.codes, expected_.numbers, expected_.values);
    }
  }

  std::string firm_fault() const {
    for (std::size_t i = 0; i < expected_.codes.size(); ++i)
      if (exact_ ? expected_.values[i] != found_.values[i] : expected_.codes[i] != found_.codes[i])
        return exact_ ? fmt::format("channel {}: expected {}, found {}", i, expected_.values[i], found_.values[i])
                      : fmt::format("code {}: expected {}, found {}", i, expected_.codes[i], found_.codes[i]);
    for (std::size_t i = 0; i < expected_.numbers.size(); ++i)
      if (expected_.numbers[i] != found_.numbers[i])
        return fmt::format("number {}: expected {}, found {}", i, expected_.numbers[i], found_.numbers[i]);
    if (expected_.index != found_.index)
      return fmt::format("index of the centroid: expected {}, found {}", expected_.index, found_.index);
    return "";
  }

  /// A code may fall on the other side of its edge, and a scale or minimum may be the neighboring 16-bit number, which
  /// is less than 1/128 of the row's largest number. For exact rows only the latter is allowed.
  /// A centroid may be another that is as near; then codes and numbers are those of another residual, and not compared.
  std::string soft_fault(const RowCodec& codec) const {
    if (expected_.index != found_.index) return "";
    if (!codec.is_exact() && !codec.uniform()) return soft_distance_fault(codec);
    float largest = 0.0f;
    for (const float x : expected_.values) largest = std::max(largest, std::abs(x));
    for (std::size_t i = 0; i < expected_.values.size(); ++i) {
      const float step =
          exact_ ? 0.0f : std::abs(expected_.numbers[i / static_cast<std::size_t>(codec.uniform()->group_size)]);
      if (!(std::abs(expected_.values[i] - found_.values[i]) <= step + largest * 0x1p-7f))
        return fmt::format("channel {} decodes to {}, expected {}", i, found_.values[i], expected_.values[i]);
    }
    return "";
  }

  /// Rows of codebooks, trellises and mixed widths. Another path through a trellis may change many codes, so rows are
  /// compared as a whole: both are near the same x_rot, about 0.3 steps away on average.
  std::string soft_distance_fault(const RowCodec& codec) const {
    const auto square = [](double x) { return x * x; };
    double distance = 0.0, steps = 0.0, largest = 0.0;
    for (std::size_t g = 0; g < codec.groups().size(); ++g) {
      const ChannelGroup& group = codec.groups()[g];
      const bool row_scale = codec.row_scale() != nullptr;
      const float step =
          std::visit(UnitStep{row_scale}, group.coder) * group.gain * expected_.numbers[row_scale ? 0 : g];
      steps += group.count * square(static_cast<double>(step));
    }
    for (std::size_t i = 0; i < expected_.values.size(); ++i) {
      largest = std::max(largest, std::abs(static_cast<double>(expected_.values[i])));
      distance += square(static_cast<double>(expected_.values[i]) - static_cast<double>(found_.values[i]));
    }
    if (distance <= steps + square(largest * 0x1p-7) * static_cast<double>(expected_.values.size())) return "";
    return fmt::format("decodes to a row at a distance of {}, expected at most {}", std::sqrt(distance),
                       std::sqrt(steps));
  }

  const PageLayout& layout_;
  const GoldenSide& golden_;
  Side side_;
  TileSide tile_;
  bool exact_;
  ScaleType type_;
  std::size_t row_bytes_;
  std::vector<RowCodec> codecs_;
  std::vector<std::vector<BitSegment>> segments_ = {};  ///< of bit tiles, by head
  Row expected_, found_;
};

constexpr float kLargestF16 = 65504.0f;

enum class Narrowed { exact, rounded, overflowed };

/// Converts bfloat16 to fp16 in place.
Narrowed narrow(std::span<std::uint16_t> bits) {
  Narrowed all = Narrowed::exact;
  for (std::uint16_t& element : bits) {
    const float x = bf16_to_float(element);
    if (!(std::abs(x) <= kLargestF16)) return Narrowed::overflowed;
    element = float_to_f16(x);
    if (f16_to_float(element) != x) all = Narrowed::rounded;
  }
  return all;
}

/// Converts rows; rows that are rounded become not firm. @return  false if a number is too large for fp16
bool narrow_rows(std::vector<std::uint16_t>& rows, GoldenSide& side) {
  const std::size_t count = side.firm.size(), size = count == 0 ? 0 : rows.size() / count;
  for (std::size_t row = 0; row < count; ++row) switch (narrow(std::span(rows).subspan(row * size, size))) {
      case Narrowed::exact: break;
      case Narrowed::rounded: side.firm[row] = 0; break;
      case Narrowed::overflowed: return false;
    }
  return true;
}

template <typename Visit>
void for_each_side(const LayerPlan& plan, const PageLayout& layout, const GoldenRows& rows, Visit visit) {
  PagedSide k(plan.k, layout, rows.k, Side::k), v(*plan.v, layout, rows.v, Side::v);
  for (PagedSide* side : {&k, &v})
    for (std::size_t row = 0; row < side->rows(); ++row) visit(*side, row);
}

}  // namespace

std::vector<std::byte> golden_pages(const LayerPlan& plan, const PageLayout& layout, const GoldenRows& rows) {
  const std::int64_t pages = (rows.tokens.count + layout.page_size - 1) / layout.page_size;
  std::vector<std::byte> bytes(static_cast<std::size_t>(pages * layout.page_bytes()));
  for_each_side(plan, layout, rows, [&](PagedSide& side, std::size_t row) { side.store(row, bytes); });
  return bytes;
}

std::optional<GoldenRows> golden_in_fp16(GoldenRows rows) {
  if (narrow(rows.tokens.q) == Narrowed::overflowed || !narrow_rows(rows.tokens.k, rows.k) ||
      !narrow_rows(rows.tokens.v, rows.v))
    return std::nullopt;
  return rows;
}

PageDifference compare_pages(const LayerPlan& plan, const PageLayout& layout, const GoldenRows& rows,
                             std::span<const std::byte> pages) {
  PageDifference difference;
  for_each_side(plan, layout, rows, [&](PagedSide& side, std::size_t row) { side.compare(row, pages, difference); });
  return difference;
}

}  // namespace kvq
