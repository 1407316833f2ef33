#include <kvq/plan/scheme.h>

namespace kvq {

int scale_bytes(ScaleType type) { return type == ScaleType::fp32 ? 4 : 2; }

const char* to_string(UniformLevels levels) { return levels == UniformLevels::affine ? "affine" : "symmetric"; }

const char* to_string(ScaleRule rule) {
  switch (rule) {
    case ScaleRule::minmax: return "minmax";
    case ScaleRule::absmax: return "absmax";
    case ScaleRule::least_squares: return "least_squares";
    case ScaleRule::norm: return "norm";
  }
  return "?";
}

const char* to_string(ScaleType type) {
  switch (type) {
    case ScaleType::fp16: return "fp16";
    case ScaleType::bf16: return "bf16";
    case ScaleType::fp32: return "fp32";
  }
  return "?";
}

const char* to_string(ZeroKind zero) { return zero == ZeroKind::floating ? "float" : "integer"; }

namespace {

struct CodeBits {
  int operator()(const ExactCoder&) const { return 16; }
  int operator()(const UniformCoder& coder) const { return coder.bits; }
};

struct RowBytes {
  int dim;
  std::int64_t operator()(const ExactCoder&) const { return std::int64_t{2} * dim; }
  std::int64_t operator()(const UniformCoder& coder) const {
    const std::int64_t codes = (std::int64_t{dim} * coder.bits + 7) / 8;
    const std::int64_t groups = dim / coder.group_size;
    return codes + groups * coder.numbers_per_group() * scale_bytes(coder.scale_type);
  }
};

}  // namespace

int code_bits(const Coder& coder) { return std::visit(CodeBits{}, coder); }
std::int64_t row_bytes(const Coder& coder, int dim) { return std::visit(RowBytes{dim}, coder); }

}  // namespace kvq
