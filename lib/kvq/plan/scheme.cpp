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
    case ScaleRule::rms: return "rms";
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

const TrellisTaps* TrellisCoder::find(int width) const {
  for (const TrellisTaps& one : taps)
    if (one.bits == width) return &one;
  return nullptr;
}

namespace {

/// The fields that every coder but exact has.
struct CommonFields {
  int bits = 16, group_size = 0, numbers = 0;
  ScaleRule rule = ScaleRule::minmax;
  ScaleType scale_type = ScaleType::fp16;
  const char* name = "exact";
};

struct ReadCommon {
  CommonFields operator()(const ExactCoder&) const { return {}; }
  CommonFields operator()(const UniformCoder& c) const {
    return {c.bits, c.group_size, c.numbers_per_group(), c.rule, c.scale_type, to_string(c.levels)};
  }
  CommonFields operator()(const CodebookCoder& c) const {
    return {c.bits, c.group_size, 1, c.rule, c.scale_type, "codebook"};
  }
  CommonFields operator()(const TrellisCoder& c) const {
    return {c.bits, c.group_size, 1, c.rule, c.scale_type, "trellis"};
  }
};

CommonFields common(const Coder& coder) { return std::visit(ReadCommon{}, coder); }

}  // namespace

int code_bits(const Coder& coder) { return common(coder).bits; }
int group_size(const Coder& coder) { return common(coder).group_size; }
ScaleRule scale_rule(const Coder& coder) { return common(coder).rule; }
ScaleType scale_type(const Coder& coder) { return common(coder).scale_type; }
int numbers_per_group(const Coder& coder) { return common(coder).numbers; }
const char* coder_name(const Coder& coder) { return common(coder).name; }

std::int64_t row_bytes(const Coder& coder, int dim) {
  const CommonFields c = common(coder);
  const std::int64_t codes = (std::int64_t{dim} * c.bits + 7) / 8;
  return c.group_size == 0 ? codes : codes + std::int64_t{dim / c.group_size} * c.numbers * scale_bytes(c.scale_type);
}

}  // namespace kvq
