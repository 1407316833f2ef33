#include <kvq/compute/parallel.h>
#include <kvq/core/error.h>
#include <kvq/core/suggestion.h>
#include <kvq/eval/float_schemes.h>
#include <kvq/eval/kivi.h>
#include <kvq/eval/scheme.h>
#include <kvq/eval/turboquant_qjl.h>
#include <kvq/solve/sphere_codebook.h>
#include <kvq/solve/structured.h>

#include <algorithm>
#include <charconv>
#include <optional>

namespace kvq {

namespace {

/// The side of a layer that a scheme stores.
struct Place {
  const LayerGeometry& geometry;
  int layer;
  Side side;
  std::uint64_t seed;
  bool with_windows;
  int dim() const { return geometry.dim(side); }
  /// Each head and side has its own random stream.
  int stream(int head) const { return kvq::stream(head, side); }
};
/// The numbers in a name.
struct Numbers {
  int bits = 0, residual = kKiviResidual;
};
using MakeSide = std::unique_ptr<StoredSide> (*)(const Place&, const Numbers&);

/// A plan that needs no data, and its storage.
class PlannedSide : public StoredSide {
 public:
  PlannedSide(TensorPlan plan, int dim) : plan_(std::move(plan)), stored_(stored_by_plan(plan_, dim, {})) {}
  void restore(const ActivationTensor& tensor, std::int64_t first, int kv_head, std::span<float> rows) const override {
    stored_->restore(tensor, first, kv_head, rows);
  }
  double effective_bits(std::int64_t context) const override { return stored_->effective_bits(context); }
  double code_bits() const override { return stored_->code_bits(); }
  const TensorPlan* plan() const override { return &plan_; }

 private:
  TensorPlan plan_;
  std::unique_ptr<StoredSide> stored_;
};

std::unique_ptr<StoredSide> planned(const Place& place, TensorPlan plan) {
  plan.rotation.scope = Scope::layer;
  if (takes_clip(plan.coder)) plan.clip_ratio = {1.0};
  validate(plan, place.geometry, place.layer, place.side);
  return std::make_unique<PlannedSide>(std::move(plan), place.dim());
}

UniformCoder affine(const Place& place, int bits) { return {.bits = bits, .group_size = place.dim()}; }

Rotation hadamard(const Place& place, int largest) {
  return {.kind = RotationKind::block_hadamard, .order = std::min(largest, hadamard_order(place.dim())), .recipe = "H"};
}

std::unique_ptr<StoredSide> bf16(const Place& place, const Numbers&) { return planned(place, {}); }

std::unique_ptr<StoredSide> naive(const Place& place, const Numbers& of) {
  return planned(place, {.coder = affine(place, of.bits)});
}

std::unique_ptr<StoredSide> quarot(const Place& place, const Numbers& of) {
  return planned(place, {.rotation = hadamard(place, place.dim()), .coder = affine(place, of.bits)});
}

std::unique_ptr<StoredSide> saw_int4(const Place& place, const Numbers& of) {
  if (place.side == Side::v) return naive(place, of);
  return planned(place, {.rotation = hadamard(place, 128), .coder = affine(place, 4)});
}

std::unique_ptr<StoredSide> symmetric_norm(const Place& place, const Numbers& of) {
  const UniformCoder coder{
      .bits = of.bits,
      .group_size = place.dim(),
      .levels = UniformLevels::symmetric,
      .rule = ScaleRule::norm,
  };
  return planned(place, {.rotation = hadamard(place, place.dim()), .coder = coder});
}

std::unique_ptr<StoredSide> tq_mse(const Place& place, const Numbers& of) {
  const ScalarCodebook& sphere = sphere_codebook(of.bits, place.dim());
  CodebookCoder coder{.bits = of.bits, .group_size = place.dim()};
  coder.tables[of.bits].assign(sphere.entries.begin(), sphere.entries.end());
  const std::vector<double> matrix = haar_matrix(place.dim(), place.seed, place.layer, place.stream(0));
  Rotation rotation{.kind = RotationKind::dense, .recipe = "Haar"};
  rotation.matrix.assign(matrix.begin(), matrix.end());
  return planned(place, {.rotation = std::move(rotation), .coder = std::move(coder)});
}

/// Keys in TurboQuant's codes for inner products. Attention averages values instead of multiplying them with queries,
/// so turboquant_qjl() stores values in the codes of least error.
class QjlSide : public StoredSide {
 public:
  QjlSide(const Place& place, int bits) : dim_(place.dim()), bits_(bits) {
    for (int h = 0; h < place.geometry.num_kv_heads; ++h)
      heads_.emplace_back(dim_, bits, place.seed, place.layer, place.stream(h));
  }
  void restore(const ActivationTensor&, std::int64_t, int kv_head, std::span<float> rows) const override {
    constexpr std::size_t kRowsPerTask = 64;
    const std::size_t step = kRowsPerTask * static_cast<std::size_t>(dim_), tasks = (rows.size() + step - 1) / step;
    parallel_for(static_cast<std::int64_t>(tasks), [&](std::int64_t task) {
      const std::size_t begin = static_cast<std::size_t>(task) * step;
      heads_[static_cast<std::size_t>(kv_head)].reconstruct(rows.subspan(begin, std::min(step, rows.size() - begin)));
    });
  }
  double effective_bits(std::int64_t) const override { return TurboQuantQjl::effective_bits(dim_, bits_); }
  double code_bits() const override { return bits_; }

 private:
  int dim_, bits_;
  std::vector<TurboQuantQjl> heads_;
};

std::unique_ptr<StoredSide> turboquant_qjl(const Place& place, const Numbers& of) {
  if (place.side == Side::v) return tq_mse(place, of);
  return std::make_unique<QjlSide>(place, of.bits);
}

std::unique_ptr<StoredSide> kivi(const Place& place, const Numbers& of) {
  return place.side == Side::k ? kivi_keys(place.dim(), of.bits, of.residual, place.with_windows)
                               : kivi_values(place.dim(), of.bits, of.residual, place.with_windows);
}

std::unique_ptr<StoredSide> kivi_scale_only(const Place& place, const Numbers& of) {
  return place.side == Side::k ? kivi_scale_only_keys(place.dim(), of.bits) : tq_mse(place, of);
}

std::unique_ptr<StoredSide> fp8(const Place&, const Numbers&) { return fp8_side(Fp8Scale::tensor); }
std::unique_ptr<StoredSide> fp8_head(const Place&, const Numbers&) { return fp8_side(Fp8Scale::head); }
std::unique_ptr<StoredSide> fp8_unscaled(const Place&, const Numbers&) { return fp8_side(Fp8Scale::one); }
std::unique_ptr<StoredSide> nvfp4(const Place& place, const Numbers&) { return nvfp4_side(place.dim()); }

struct Family {
  SchemeFamily described;
  MakeSide make;
  int fixed_bits = 0;         ///< 0: in the name
  int default_bits = 0;       ///< if the name omits the bits; 0: the name must have them
  bool has_residual = false;  ///< whether -r<n> may follow the bits
};

/// All schemes. A new scheme is one entry.
const std::vector<Family>& families() {
  static const std::vector<Family> all = {
      {{"bf16", "rows in bfloat16"}, bf16, 16},
      {{"fp8", "e4m3, a scale for each layer and side: max |x| / 448"}, fp8, 8},
      {{"fp8-head", "the same with a scale for each KV head"}, fp8_head, 8},
      {{"fp8-unscaled", "e4m3 with scale 1, as served without scales"}, fp8_unscaled, 8},
      {{"nvfp4", "e2m1, an e4m3 scale for 16 channels"}, nvfp4, 4},
      {{"naive-int<b>", "affine codes, one scale and minimum a row"}, naive},
      {{"quarot-int<b>", "the same after a Hadamard rotation of the head"}, quarot},
      {{"saw-int4", "INT4, keys in Hadamard blocks of at most 128 channels"}, saw_int4, 4},
      {{"symmetric-norm-<b>", "Hadamard, symmetric codes whose scale keeps the norm"}, symmetric_norm},
      {{"tq-mse-<b>", "TurboQuant-MSE: Haar, Lloyd-Max codes, norm kept"}, tq_mse},
      {{"turboquant-qjl-<b>", "keys: TurboQuant with a QJL bit; values: tq-mse-<b>"}, turboquant_qjl, 0, 2},
      {{"kivi-<b>", "keys by channel in 32 tokens, values by token in 32 channels, 128 recent exact"},
       kivi,
       0,
       2,
       true},
      {{"kivi-scale-only-<b>", "Block-GTQ's KIVI without buffer: scales of the 32 tokens before"},
       kivi_scale_only,
       0,
       2}};
  return all;
}

/// Cuts "-r<n>" off a name. Empty if there is none, or if n is not 32, 64, 96, ... up to 65536.
std::optional<int> cut_residual(std::string_view& name) {
  constexpr int kGroup = 32, kMost = 65536;
  const std::size_t at = name.rfind("-r");
  if (at == std::string_view::npos) return std::nullopt;
  const char *first = name.data() + at + 2, *end = name.data() + name.size();
  int residual = 0;
  const auto [stop, failed] = std::from_chars(first, end, residual);
  if (failed != std::errc{} || stop != end || *first == '0' || residual < kGroup || residual > kMost ||
      residual % kGroup != 0)
    return std::nullopt;
  name = name.substr(0, at);
  return residual;
}

/// The numbers that `name` has in place of those of the pattern; empty if `name` does not match.
std::optional<Numbers> match(const Family& family, std::string_view name) {
  const std::string_view pattern = family.described.pattern;
  if (family.fixed_bits > 0) return name == pattern ? std::optional(Numbers{family.fixed_bits}) : std::nullopt;
  Numbers numbers{.bits = family.default_bits};
  if (family.has_residual) numbers.residual = cut_residual(name).value_or(numbers.residual);
  const std::string_view stem = pattern.substr(0, pattern.size() - 3);
  if (family.default_bits > 0 && name.size() + 1 == stem.size() && stem.starts_with(name)) return numbers;
  if (name.size() != stem.size() + 1 || !name.starts_with(stem)) return std::nullopt;
  numbers.bits = name.back() - '0';
  return numbers.bits >= 1 && numbers.bits <= 8 ? std::optional(numbers) : std::nullopt;
}

}  // namespace

const std::vector<SchemeFamily>& scheme_families() {
  static const std::vector<SchemeFamily> described = [] {
    std::vector<SchemeFamily> rows;
    for (const Family& family : families()) rows.push_back(family.described);
    return rows;
  }();
  return described;
}

std::vector<std::string> scheme_names() {
  std::vector<std::string> names;
  for (const Family& family : families()) {
    const std::string pattern(family.described.pattern);
    const std::size_t bits = pattern.find("<b>");
    if (bits == std::string::npos) names.push_back(pattern);
    for (int b = 1; bits != std::string::npos && b <= 8; ++b)
      names.push_back(pattern.substr(0, bits) + std::to_string(b));
  }
  return names;
}

Scheme find_scheme(std::string_view name) {
  const bool keys_only = name.ends_with("-k");
  const std::string_view stem = keys_only ? name.substr(0, name.size() - 2) : name;
  std::string names;
  for (const Family& family : families()) {
    names += fmt::format("{}{}", names.empty() ? "" : ", ", family.described.pattern);
    const std::optional<Numbers> numbers = match(family, stem);
    if (!numbers) continue;
    return {std::string(name), [make = family.make, numbers = *numbers, keys_only](
                                   const LayerGeometry& geometry, int layer, std::uint64_t seed, bool with_windows) {
              StoredLayer stored{make({geometry, layer, Side::k, seed, with_windows}, numbers), nullptr};
              if (geometry.v_head_dim > 0 && !keys_only)
                stored.v = make({geometry, layer, Side::v, seed, with_windows}, numbers);
              return stored;
            }};
  }
  const std::string nearest = nearest_name(stem, scheme_names());
  throw Error{ErrorKind::usage, fmt::format("--scheme: unknown \"{}\"", name),
              nearest.empty()
                  ? fmt::format("choose one of {}; <b> is 1 to 8, -r32 behind kivi-<b> sets its residual (a "
                                "multiple of 32), the suffix -k codes keys only",
                                names)
                  : fmt::format("did you mean {}? kvq-eval --help lists all schemes", nearest)};
}

}  // namespace kvq
