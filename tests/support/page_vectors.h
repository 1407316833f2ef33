#pragma once

#include <kvq/codec/page_codec.h>
#include <kvq/plan/layer_pages.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace kvq::test {

/// One page, or one sequence's slot of the windows, derived by hand from formats/pages.md.
struct PageVector {
  struct Row {
    Side side = Side::k;
    int head = 0;
    int place = 0;                     ///< slot of the page; position if in the windows
    std::vector<std::uint8_t> codes;   ///< [D], of coded rows
    std::vector<float> numbers;        ///< [G] scales, then for affine [G] minima
    std::vector<std::uint16_t> exact;  ///< [D] bfloat16, of exact rows
  };

  std::string name, why;
  LayerPlan plan;         ///< sides in pages; symmetric ones of rule absmax
  bool in_pages = true;   ///< else in the windows
  PageLayout pages = {};  ///< of windows: with 16 tokens
  WindowLayout windows = {};
  int sink_tokens = 0;
  std::vector<Row> rows;
  std::vector<std::byte> bytes;

  const TensorPlan& side(Side which) const { return which == Side::v ? *plan.v : plan.k; }
};

/// @param text  of formats/page_vectors.json
std::vector<PageVector> parse_page_vectors(const std::string& text);

}  // namespace kvq::test
