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

}  // namespace kvq
