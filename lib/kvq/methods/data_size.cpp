#include <kvq/core/error.h>
#include <kvq/methods/data_size.h>

#include <algorithm>

namespace kvq {

std::string too_few_tokens(const ModelGeometry& model, std::int64_t tokens, bool has_budget) {
  int largest = 0;
  for (const LayerEntry& layer : model.layers)
    largest = std::max({largest, layer.geometry.head_dim, layer.has_values ? layer.geometry.v_head_dim : 0});
  const int each = has_budget ? kEnoughTokensOfBudget : kEnoughTokensPerChannel;
  const std::int64_t enough = std::int64_t{each} * largest;
  if (tokens >= enough) return "";
  return fmt::format(
      "calibrated on {} tokens: with fewer than {} ({} for each channel of a head) in-sample errors flatter the plan, "
      "and errors on other text are larger",
      tokens, enough, each);
}

void check_tokens(std::int64_t tokens) {
  if (tokens < kLeastTokens)
    throw Error{ErrorKind::usage,
                fmt::format("too little data: expected at least {} tokens, found {}", kLeastTokens, tokens),
                "dump about 10000 tokens of text like that you serve (scripts/dump_qkv.py)"};
}

}  // namespace kvq
