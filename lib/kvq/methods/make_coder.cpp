#include <kvq/core/error.h>
#include <kvq/methods/make_coder.h>
#include <kvq/plan/table_rows.h>
#include <kvq/solve/sphere_codebook.h>
#include <kvq/solve/trellis_tables.h>

#include <algorithm>
#include <cmath>

namespace kvq {

namespace {

/// The codebook that is stored: kernels look up its levels.
std::vector<float> stored_table(const ScalarCodebook& codebook) { return level_grid(codebook.entries); }

CodebookCoder codebook_coder(const SideOptions& side, int bits, int group_size) {
  return {
      .bits = bits,
      .group_size = group_size,
      .rule = side.rule,
      .scale_type = side.scale_type,
      .per_head = false,
      .fitted = side.fitted,
      .tables = {},
  };
}

UniformCoder symmetric_coder(const SideOptions& side, int bits, int group_size, ScaleRule rule) {
  return {
      .bits = bits,
      .group_size = group_size,
      .levels = UniformLevels::symmetric,
      .rule = rule,
      .scale_type = side.scale_type,
  };
}

/// Scale rule of the symmetric codes that a trellis coder uses at widths without a trellis (packing.md (d)).
ScaleRule rule_without_trellis(ScaleRule rule) { return rule == ScaleRule::least_squares ? rule : ScaleRule::norm; }

/// Consecutive channels of one width, cut into groups of `group` channels.
struct Run {
  int width, first, count, group;
};

std::vector<Run> runs_of(const TensorPlan& plan, int entry, int dim) {
  const RowLayout layout = row_layout(plan, entry, dim);
  std::vector<Run> runs;
  for (int s = 0; s < layout.num_segments; ++s) {
    const CodeSegment& segment = layout.segments[static_cast<std::size_t>(s)];
    runs.push_back({segment.bits, segment.first_channel, segment.channels,
                    plan.allocation ? segment.channels : group_size(plan.coder)});
  }
  return runs;
}

/// Channels of a run divided by the root mean square of their group, for all rows of all heads, without groups of
/// zeros.
std::vector<float> normalised(const std::vector<RotatedData>& heads, const Run& run) {
  std::vector<float> samples;
  for (const RotatedData& data : heads)
    for (std::size_t row = 0; row < data.rows.size(); row += static_cast<std::size_t>(data.dim))
      for (int start = run.first; start < run.first + run.count; start += run.group) {
        const float* x = data.rows.data() + row + static_cast<std::size_t>(start);
        double energy = 0.0;
        for (int j = 0; j < run.group; ++j) energy += double{x[j]} * double{x[j]};
        if (!(energy > 0.0)) continue;
        const double scale = std::sqrt(run.group / energy);
        for (int j = 0; j < run.group; ++j) samples.push_back(static_cast<float>(x[j] * scale));
      }
  return samples;
}

/// Whether entries ascend strictly. Fitting, or rounding to float32, can make neighboring entries equal; table_for()
/// then keeps the table of the sphere.
bool ascends(const std::vector<float>& table) {
  return std::adjacent_find(table.begin(), table.end(), std::greater_equal<>()) == table.end();
}

std::vector<float> table_for(const Run& run, bool fitted, const std::vector<RotatedData>& heads, Backend& backend) {
  const ScalarCodebook& sphere = sphere_codebook(run.width, run.group);
  if (!fitted) return stored_table(sphere);
  std::vector<float> table = stored_table(fit_codebook(backend.sorted(normalised(heads, run)), sphere));
  return ascends(table) ? table : stored_table(sphere);
}

/// The shortest run of a width in any head that is long enough for a trellis; `dim` if there is none.
int shortest_run(const BitAllocation& allocation, int width, int dim) {
  int shortest = dim;
  for (std::size_t head = 0; head < allocation.channel_bits.size(); head += static_cast<std::size_t>(dim)) {
    const auto begin = allocation.channel_bits.begin() + static_cast<std::ptrdiff_t>(head);
    const auto count = static_cast<int>(std::count(begin, begin + dim, static_cast<std::uint8_t>(width)));
    if (count >= TrellisGroup::kLeastChannels) shortest = std::min(shortest, count);
  }
  return shortest;
}

struct FitNeedsRows {
  bool operator()(const ExactCoder&) const { return false; }
  bool operator()(const UniformCoder&) const { return false; }
  bool operator()(const CodebookCoder&) const { return true; }
  bool operator()(const TrellisCoder&) const { return false; }
};

/// Makes the tables of a plan's coder from rotated rows.
struct FitTables {
  TensorPlan& plan;
  bool fitted;
  std::span<const std::vector<RotatedData>> heads;
  Backend& backend;

  void operator()(ExactCoder&) const {}
  void operator()(UniformCoder&) const {}
  void operator()(CodebookCoder& coder) const {
    if (!fitted && !plan.allocation) return;
    coder.per_head = true;
    coder.fitted = fitted;
    coder.tables.clear();
    const int dim = heads.front().front().dim;
    for (std::size_t h = 0; h < heads.size(); ++h)
      for (const Run& run : runs_of(plan, static_cast<int>(h), dim)) coder.tables[run.width];
    for (auto& [width, table] : coder.tables) {
      for (std::size_t h = 0; h < heads.size(); ++h) {
        // A head without channels of this width gets the table of a large group, so that the tensor has one shape.
        Run run{width, 0, 0, dim};
        bool used = false;
        for (const Run& own : runs_of(plan, static_cast<int>(h), dim))
          if (own.width == width) {
            run = own;
            used = true;
          }
        const std::vector<float> own = table_for(run, fitted && used, heads[h], backend);
        table.insert(table.end(), own.begin(), own.end());
      }
    }
  }
  void operator()(TrellisCoder&) const {}
};

}  // namespace

const CoderTraits& traits_of(CoderKind kind) {
  // Lloyd-Max: sphere_codebook(b, 1024). Symmetric: the Gaussian-optimal step of packing.md (b). Trellis: groups of 128
  // channels with the longest memory; from five bits on they are symmetric (the fifth rounded down, to keep the law
  // convex). Quantizing 128 channels takes 120 us with a trellis, 6 us with uniform codes of one width, and 20 us
  // otherwise.
  static constexpr RateLaw kCodebookLaw = {1.0,     0.3632,  0.1174,   0.03446,  0.00947,
                                           0.00249, 0.00064, 0.000162, 0.0000407};
  static constexpr RateLaw kSymmetricLaw = {1.0,      0.3634,  0.1188,   0.03744,  0.01154,
                                            0.003495, 0.00104, 0.000304, 0.0000875};
  static constexpr RateLaw kTrellisLaw = {1.0, 0.3634, 0.0791, 0.0205, 0.00578, 0.00341, 0.00104, 0.000304, 0.0000875};
  constexpr double kFastest = 6e-6 / 128, kFast = 2e-5 / 128, kSlow = 1.2e-4 / 128;
  static constexpr CoderTraits kAffine = {8.0, false, ScaleRule::minmax, kSymmetricLaw, kFastest};
  static constexpr CoderTraits kSymmetric = {8.0, true, ScaleRule::norm, kSymmetricLaw, kFast};
  static constexpr CoderTraits kCodebook = {8.0, true, ScaleRule::norm, kCodebookLaw, kFast};
  static constexpr CoderTraits kTrellis = {4.0, true, ScaleRule::norm, kTrellisLaw, kSlow};
  switch (kind) {
    case CoderKind::symmetric: return kSymmetric;
    case CoderKind::codebook: return kCodebook;
    case CoderKind::trellis: return kTrellis;
    case CoderKind::exact:
    case CoderKind::affine: break;
  }
  return kAffine;
}

Coder make_coder(const Options& options, Side which, int group) {
  const SideOptions& side = options.side(which);
  const int bits = static_cast<int>(side.bits);
  switch (side.coder) {
    case CoderKind::exact: return ExactCoder{};
    case CoderKind::affine:
    case CoderKind::symmetric:
      return UniformCoder{
          .bits = bits,
          .group_size = group,
          .levels = side.coder == CoderKind::affine ? UniformLevels::affine : UniformLevels::symmetric,
          .rule = side.rule,
          .scale_type = side.scale_type,
          .zero = side.zero,
      };
    case CoderKind::codebook: {
      CodebookCoder coder = codebook_coder(side, bits, group);
      coder.tables[bits] = stored_table(sphere_codebook(bits, group));
      return coder;
    }
    case CoderKind::trellis: break;
  }
  // With one bit no trellis is better than symmetric codes, so trellis_taps() is empty.
  const auto taps = trellis_taps(bits, options.memory, group);
  if (taps.empty()) return symmetric_coder(side, bits, group, rule_without_trellis(side.rule));
  return TrellisCoder{
      .bits = bits,
      .group_size = group,
      .rule = side.rule,
      .scale_type = side.scale_type,
      .taps = taps,
  };
}

Coder make_mixed_coder(const Options& options, Side which, const BitAllocation& allocation, int dim) {
  const int largest = *std::max_element(allocation.channel_bits.begin(), allocation.channel_bits.end());
  const SideOptions& side = options.side(which);
  switch (side.coder) {
    case CoderKind::exact:
    case CoderKind::affine:
    case CoderKind::symmetric: return symmetric_coder(side, largest, 0, side.rule);
    case CoderKind::codebook: return codebook_coder(side, largest, 0);
    case CoderKind::trellis: break;
  }
  TrellisCoder coder{.bits = largest, .group_size = 0, .rule = side.rule, .scale_type = side.scale_type, .taps = {}};
  for (int bits = 1; bits <= largest; ++bits)
    for (TrellisTaps& taps : trellis_taps(bits, options.memory, shortest_run(allocation, bits, dim)))
      coder.taps.push_back(std::move(taps));
  if (coder.taps.empty()) return symmetric_coder(side, largest, 0, rule_without_trellis(side.rule));
  return coder;
}

bool fit_needs_rows(const Coder& coder) { return std::visit(FitNeedsRows{}, coder); }

void fit_tables(TensorPlan& plan, bool fitted, std::span<const std::vector<RotatedData>> heads, Backend& backend) {
  std::visit(FitTables{plan, fitted, heads, backend}, plan.coder);
}

}  // namespace kvq
