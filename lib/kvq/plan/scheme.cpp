#include <kvq/plan/scheme.h>

#include <algorithm>

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

const char* to_string(TrellisSearch search) {
  switch (search) {
    case TrellisSearch::binary32: return "binary32";
    case TrellisSearch::integer: return "integer";
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

const char* to_string(CoderKind kind) {
  switch (kind) {
    case CoderKind::exact: return "exact";
    case CoderKind::affine: return "affine";
    case CoderKind::symmetric: return "symmetric";
    case CoderKind::codebook: return "codebook";
    case CoderKind::trellis: return "trellis";
  }
  return "?";
}

const TrellisTaps* TrellisCoder::find(int width) const {
  for (const TrellisTaps& one : taps)
    if (one.bits == width) return &one;
  return nullptr;
}

bool TrellisCoder::searches_integers() const {
  return std::any_of(taps.begin(), taps.end(),
                     [](const TrellisTaps& one) { return one.search == TrellisSearch::integer; });
}

namespace {

/// The fields that every coder but exact has.
struct CommonFields {
  int bits = 16, group_size = 0, numbers = 0;
  ScaleRule rule = ScaleRule::minmax;
  ScaleType scale_type = ScaleType::fp16;
  CoderKind kind = CoderKind::exact;
};

struct ReadCommon {
  CommonFields operator()(const ExactCoder&) const { return {}; }
  CommonFields operator()(const UniformCoder& c) const {
    return {c.bits, c.group_size, c.numbers_per_group(),
            c.rule, c.scale_type, c.levels == UniformLevels::affine ? CoderKind::affine : CoderKind::symmetric};
  }
  CommonFields operator()(const CodebookCoder& c) const {
    return {c.bits, c.group_size, 1, c.rule, c.scale_type, CoderKind::codebook};
  }
  CommonFields operator()(const TrellisCoder& c) const {
    return {c.bits, c.group_size, 1, c.rule, c.scale_type, CoderKind::trellis};
  }
};

CommonFields common(const Coder& coder) { return std::visit(ReadCommon{}, coder); }

}  // namespace

CoderKind kind_of(const Coder& coder) { return common(coder).kind; }

Coder default_coder(CoderKind kind) {
  switch (kind) {
    case CoderKind::exact: return ExactCoder{};
    case CoderKind::affine: return UniformCoder{.levels = UniformLevels::affine, .rule = ScaleRule::minmax};
    case CoderKind::symmetric: return UniformCoder{.levels = UniformLevels::symmetric, .rule = ScaleRule::norm};
    case CoderKind::codebook: return CodebookCoder{};
    case CoderKind::trellis: return TrellisCoder{};
  }
  return ExactCoder{};
}

bool is_exact(const Coder& coder) { return kind_of(coder) == CoderKind::exact; }
bool takes_clip(const Coder& coder) { return !is_exact(coder) && scale_rule(coder) == ScaleRule::minmax; }

int code_bits(const Coder& coder) { return common(coder).bits; }
int group_size(const Coder& coder) { return common(coder).group_size; }
ScaleRule scale_rule(const Coder& coder) { return common(coder).rule; }
ScaleType scale_type(const Coder& coder) { return common(coder).scale_type; }
int numbers_per_group(const Coder& coder) { return common(coder).numbers; }
const char* coder_name(const Coder& coder) { return to_string(kind_of(coder)); }

std::int64_t row_bytes(const Coder& coder, int dim) {
  const CommonFields c = common(coder);
  const std::int64_t codes = (std::int64_t{dim} * c.bits + 7) / 8;
  return c.group_size == 0 ? codes : codes + std::int64_t{dim / c.group_size} * c.numbers * scale_bytes(c.scale_type);
}

}  // namespace kvq
