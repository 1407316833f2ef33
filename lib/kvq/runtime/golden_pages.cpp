#include <kvq/codec/page_codec.h>
#include <kvq/codec/row_codec.h>
#include <kvq/core/dtype.h>
#include <kvq/core/error.h>
#include <kvq/runtime/golden_pages.h>

#include <algorithm>
#include <cmath>

namespace kvq {

namespace {

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
        row_bytes_(static_cast<std::size_t>(row_bytes(plan, tile_.head_dim))),
        expected_(tile_),
        found_(expected_) {
    for (int head = 0; head < layout.num_kv_heads; ++head) codecs_.emplace_back(plan, head, tile_.head_dim);
  }

  std::size_t rows() const { return golden_.firm.size(); }

  void store(std::size_t row, std::span<std::byte> pages) {
    load_golden(row);
    const auto at = page(row, pages);
    if (exact_)
      store_page_row(layout_, side_, head(row), slot(row), expected_.values, at);
    else
      store_page_row(layout_, side_, type_, head(row), slot(row), expected_.codes, expected_.numbers, at);
  }

  void compare(std::size_t row, std::span<const std::byte> pages, PageDifference& difference) {
    load_golden(row);
    const auto at = page(row, pages);
    if (exact_) {
      load_page_row(layout_, side_, head(row), slot(row), at, found_.values);
    } else {
      load_page_row(layout_, side_, type_, head(row), slot(row), at, found_.codes, found_.numbers);
      codec(row).decode(found_.codes, found_.numbers, found_.values);
    }
    ++difference.rows;
    const bool firm = golden_.firm[row] != 0;
    difference.firm_rows += firm;
    const std::string fault = firm ? firm_fault() : soft_fault();
    if (fault.empty()) return;
    ++(firm ? difference.firm_faults : difference.soft_faults);
    if (difference.first.empty())
      difference.first = fmt::format("{} of token {} head {}: {}", name(side_), token(row), head(row), fault);
  }

 private:
  struct Row {
    explicit Row(const TileSide& tile)
        : codes(static_cast<std::size_t>(tile.head_dim)),
          numbers(static_cast<std::size_t>(tile.groups() * tile.numbers)),
          values(static_cast<std::size_t>(tile.head_dim)) {}
    std::vector<std::uint8_t> codes;
    std::vector<float> numbers, values;
  };

  std::int64_t token(std::size_t row) const { return static_cast<std::int64_t>(row) / layout_.num_kv_heads; }
  int head(std::size_t row) const { return static_cast<int>(static_cast<std::int64_t>(row) % layout_.num_kv_heads); }
  int slot(std::size_t row) const { return static_cast<int>(token(row) % layout_.page_size); }
  const RowCodec& codec(std::size_t row) const { return codecs_[static_cast<std::size_t>(head(row))]; }

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
      codec(row).unpack(bytes, expected_.codes, expected_.numbers);
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
    return "";
  }

  /// A code may fall on the other side of its edge, and a scale or minimum may be the neighboring 16-bit number, which
  /// is less than 1/128 of the row's largest number. For exact rows only the latter is allowed.
  std::string soft_fault() const {
    float largest = 0.0f;
    for (const float x : expected_.values) largest = std::max(largest, std::abs(x));
    for (std::size_t i = 0; i < expected_.values.size(); ++i) {
      const float step = exact_ ? 0.0f : std::abs(expected_.numbers[i / static_cast<std::size_t>(tile_.group_size)]);
      if (!(std::abs(expected_.values[i] - found_.values[i]) <= step + largest * 0x1p-7f))
        return fmt::format("channel {} decodes to {}, expected {}", i, found_.values[i], expected_.values[i]);
    }
    return "";
  }

  const PageLayout& layout_;
  const GoldenSide& golden_;
  Side side_;
  TileSide tile_;
  bool exact_;
  ScaleType type_;
  std::size_t row_bytes_;
  std::vector<RowCodec> codecs_;
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
