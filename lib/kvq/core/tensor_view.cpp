#include <kvq/core/error.h>
#include <kvq/core/tensor_view.h>

namespace kvq {

void TensorView::load_head(int head, std::int64_t first, std::int64_t count, float* out) const {
  KVQ_ASSERT(head >= 0 && head < heads && first >= 0 && count >= 0 && count <= tokens - first);
  const std::size_t row_bytes = static_cast<std::size_t>(dim) * size_of(dtype);
  const std::size_t token_bytes = static_cast<std::size_t>(heads) * row_bytes;
  const std::byte* row =
      data + static_cast<std::size_t>(first) * token_bytes + static_cast<std::size_t>(head) * row_bytes;
  for (std::int64_t t = 0; t < count; ++t, row += token_bytes, out += dim)
    widen(dtype, row, static_cast<std::size_t>(dim), out);
}

}  // namespace kvq
