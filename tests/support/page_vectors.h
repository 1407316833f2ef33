#pragma once

#include <kvq/codec/page_codec.h>
#include <kvq/plan/layer_pages.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace kvq::test {

/// A vector of formats/page_vectors.json: one page, or one slot of exact rows.
struct PageVector {
  struct Row {
    Side side = Side::k;
    int head = 0;
    int place = 0;                     ///< slot in the page; position if in a slot of exact rows
    std::vector<std::uint8_t> codes;   ///< [D]; empty for exact rows
    std::vector<float> numbers;        ///< of the head's row: scales, then for affine minima or zero points
    std::optional<int> index;          ///< of the centroid
    std::vector<std::uint16_t> exact;  ///< [D] bfloat16; empty for quantized rows
  };

  std::string name, why;
  LayerPlan plan;         ///< not valid: symmetric sides have the rule absmax, codebooks and centroids no numbers
  bool in_pages = true;   ///< false: a sink slot or a ring
  PageLayout pages = {};  ///< of exact rows: with 16 tokens
  WindowLayout windows = {};
  std::vector<Row> rows;
  std::vector<std::byte> bytes;

  const TensorPlan& side(Side which) const { return which == Side::v ? *plan.v : plan.k; }
};

/// @param text  contents of formats/page_vectors.json
std::vector<PageVector> parse_page_vectors(const std::string& text);

}  // namespace kvq::test
