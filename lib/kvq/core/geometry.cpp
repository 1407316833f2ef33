#include <kvq/core/geometry.h>

namespace kvq {

const char* to_string(RopeLayout layout) {
  switch (layout) {
    case RopeLayout::none: return "none";
    case RopeLayout::half: return "half";
    case RopeLayout::interleaved: return "interleaved";
  }
  return "?";
}

const char* to_string(AttentionKind kind) {
  switch (kind) {
    case AttentionKind::gqa: return "gqa";
    case AttentionKind::mla_rope: return "mla_rope";
  }
  return "?";
}

const char* to_string(CapturePoint point) {
  switch (point) {
    case CapturePoint::post_rope: return "post_rope";
    case CapturePoint::pre_rope: return "pre_rope";
  }
  return "?";
}

std::vector<RopeBlock> rope_blocks(const LayerGeometry& geometry) {
  const RopeStyle& rope = geometry.rope;
  std::vector<RopeBlock> blocks;
  for (int i = 0; i < rope.dim / 2; ++i) {
    if (rope.layout == RopeLayout::interleaved)
      blocks.push_back({rope.offset + 2 * i, rope.offset + 2 * i + 1});
    else
      blocks.push_back({rope.offset + i, rope.offset + rope.dim / 2 + i});
  }
  std::vector<int> rest;
  for (int j = 0; j < geometry.head_dim; ++j)
    if (j < rope.offset || j >= rope.offset + rope.dim) rest.push_back(j);
  for (std::size_t i = 0; i < rest.size(); i += 2) blocks.push_back({rest[i], i + 1 < rest.size() ? rest[i + 1] : -1});
  return blocks;
}

}  // namespace kvq
