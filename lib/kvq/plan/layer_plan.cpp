#include <kvq/plan/layer_plan.h>

#include <kvq/core/error.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <numeric>

namespace kvq {

namespace {

struct Checker {
  int layer;
  Side side;

  [[noreturn]] void fail(const std::string& what) const {
    throw Error{ErrorKind::bad_input, fmt::format("layer {} {}: {}", layer, name(side), what)};
  }
  void expect_size(std::size_t found, std::size_t expected, const char* name) const {
    if (found != expected) fail(fmt::format("{}: expected {} values, found {}", name, expected, found));
  }
  template <typename T>
  void expect_finite(const std::vector<T>& values, const char* name) const {
    for (std::size_t i = 0; i < values.size(); ++i)
      if (!std::isfinite(values[i])) fail(fmt::format("{}: value {} is not finite", name, i));
  }

  void check_rotation(const Rotation& rotation, int num_kv_heads, int dim) const {
    const auto heads = static_cast<std::size_t>(rotation.scope == Scope::layer ? 1 : num_kv_heads);
    const auto d = static_cast<std::size_t>(dim);
    expect_size(rotation.matrix.size(), rotation.kind == RotationKind::dense ? heads * d * d : 0, "rotation");
    if (!rotation.signs.empty()) expect_size(rotation.signs.size(), heads * d, "hadamard_signs");
    if (!rotation.inverse.empty())
      expect_size(rotation.inverse.size(), rotation.kind == RotationKind::dense ? heads * d * d : 0, "inverse");
    if (!rotation.channel_scale.empty())
      expect_size(rotation.channel_scale.size(), rotation.kind == RotationKind::dense ? 0 : heads * d, "channel_scale");
    for (const float scale : rotation.channel_scale)
      if (!(scale >= kLeastChannelScale && scale <= kMostChannelScale) ||
          (std::bit_cast<std::uint32_t>(scale) & 0xffffu) != 0)
        fail(fmt::format("channel_scale: expected bfloat16 numbers from 2^-24 to 2^24, found {}", scale));
    expect_finite(rotation.inverse, "inverse");
    for (const auto sign : rotation.signs)
      if (sign != 1 && sign != -1) fail(fmt::format("hadamard_signs: expected +1 or -1, found {}", int{sign}));
    if ((rotation.kind == RotationKind::block_hadamard || rotation.order != 0) &&
        (rotation.order < 1 || dim % rotation.order != 0 || (rotation.order & (rotation.order - 1)) != 0))
      fail(fmt::format("rotation order: expected a power of two that divides head_dim {}, found {}", dim,
                       rotation.order));
    if (!rotation.sign_choice.empty()) expect_size(rotation.sign_choice.size(), heads, "sign_choice");
    if (!rotation.eigenbasis.empty()) expect_size(rotation.eigenbasis.size(), heads * d * d, "eigenbasis");
    if (!rotation.spectrum.empty()) expect_size(rotation.spectrum.size(), heads * d, "spectrum");
    if (rotation.eigenbasis.empty() != rotation.spectrum.empty())
      fail("eigenbasis and spectrum: expected both or none");
    expect_finite(rotation.matrix, "rotation");
    expect_finite(rotation.eigenbasis, "eigenbasis");
    expect_finite(rotation.spectrum, "spectrum");
  }

  void check_transform(const TensorPlan& plan, std::size_t heads) const {
    if (plan.rotation.is_orthogonal() == plan.transform.has_value())
      fail(plan.transform ? "transform: expected a channel_scale or an inverse beside it, found neither"
                          : "channel_scale or inverse without a transform");
    if (!plan.transform) return;
    if (plan.centroids) fail("transform and centroids: expected one of both");
    if (is_exact(plan.coder)) fail("a transform does not go with coder exact");
    const MetricTransform& t = *plan.transform;
    if (t.kind != "diagonal" && t.kind != "balanced" && t.kind != "klt" && t.kind != "mixed")
      fail(fmt::format("transform: expected diagonal, balanced, klt or mixed, found {}", t.kind));
    expect_size(t.outlier_gain.size(), heads, "outlier_gain");
    expect_size(t.condition.size(), heads, "condition");
    for (const double gain : t.outlier_gain)
      if (!(std::isfinite(gain) && gain >= 1.0))
        fail(fmt::format("outlier_gain: expected finite numbers of at least 1, found {}", gain));
    for (const double condition : t.condition)
      if (!(condition >= 1.0 && condition <= kMostCondition))
        fail(fmt::format("condition: expected 1 to {}, found {}", kMostCondition, condition));
  }

  void check_clip(const TensorPlan& plan, std::size_t heads) const {
    expect_size(plan.clip_ratio.size(), takes_clip(plan.coder) ? heads : 0, "clip_ratio");
    for (const double rho : plan.clip_ratio)
      if (!(rho > 0.0 && rho <= 1.0)) fail(fmt::format("clip_ratio: expected a number in (0, 1], found {}", rho));
  }

  void check_rule(const Coder& coder, std::initializer_list<ScaleRule> allowed) const {
    const ScaleRule rule = scale_rule(coder);
    if (std::find(allowed.begin(), allowed.end(), rule) == allowed.end())
      fail(fmt::format("scale_rule {} does not go with coder {}", to_string(rule), coder_name(coder)));
  }

  void check_groups(const Coder& coder, bool mixed, int dim) const {
    const int bits = code_bits(coder), group = group_size(coder);
    if (bits < 1 || bits > 8) fail(fmt::format("bits: expected 1 to 8, found {}", bits));
    if (mixed ? group != 0 : group < 1 || dim % group != 0)
      fail(fmt::format("group_size: expected {} {}, found {}",
                       mixed ? "none for mixed widths, head_dim" : "a divisor of head_dim", dim, group));
  }

  void check_tables(const CodebookCoder& coder, std::size_t heads) const {
    for (const auto& [bits, table] : coder.tables) {
      const std::string name = fmt::format("codebook.{}", bits);
      if (bits < 1 || bits > 8) fail(name + ": expected a width of 1 to 8");
      const std::size_t size = std::size_t{1} << bits;
      expect_size(table.size(), (coder.per_head ? heads : 1) * size, name.c_str());
      expect_finite(table, name.c_str());
      for (std::size_t i = 1; i < table.size(); ++i)
        if (i % size != 0 && !(table[i - 1] < table[i]))
          fail(fmt::format("{}: entry {} is not above the one before it", name, i % size));
    }
    if (!coder.tables.count(coder.bits)) fail(fmt::format("codebook.{} is missing", coder.bits));
  }

  void check_taps(const TrellisCoder& coder, bool mixed) const {
    int below = 0;
    for (const TrellisTaps& taps : coder.taps) {
      if (taps.bits <= below || taps.bits > 8)
        fail(fmt::format("trellis: expected ascending widths of 1 to 8, found {}", taps.bits));
      below = taps.bits;
      if (taps.memory < 1 || taps.bits * (taps.memory + 1) > 16 || taps.bits * taps.memory > 8 || taps.memory > 8)
        fail(fmt::format("trellis: {} bits do not go with memory {}", taps.bits, taps.memory));
      const int thetas = taps.bits * (taps.memory + 1);
      expect_size(taps.theta.size(), static_cast<std::size_t>(thetas), "trellis");
      expect_finite(taps.theta, "trellis");
    }
    if (!mixed && !coder.find(coder.bits)) fail(fmt::format("trellis: no theta for {} bits", coder.bits));
  }

  /// Rejects a width that the coder cannot quantize in mixed rows.
  struct CheckWidth {
    const Checker& checker;
    int width;
    void operator()(const ExactCoder&) const {}
    void operator()(const UniformCoder&) const {}
    void operator()(const CodebookCoder& coder) const {
      if (!coder.tables.count(width)) checker.fail(fmt::format("codebook.{} is missing", width));
    }
    void operator()(const TrellisCoder&) const {}  // widths without theta are symmetric
  };

  void check_allocation(const TensorPlan& plan, std::size_t heads, int dim) const {
    const BitAllocation& a = *plan.allocation;
    const auto d = static_cast<std::size_t>(dim), blocks = static_cast<std::size_t>(num_blocks(dim));
    if (a.unit != "channel" && !(a.unit == "rope_block" && side == Side::k))
      fail(fmt::format("allocation unit: expected channel{}, found {}", side == Side::k ? " or rope_block" : "",
                       a.unit));
    for (const double value : {a.objective, a.free_objective})
      if (!(std::isfinite(value) && value >= 0.0))
        fail(fmt::format("allocation objective: expected a finite number of at least 0, found {}", value));
    expect_size(a.channel_bits.size(), heads * d, "channel_bits");
    expect_size(a.channel_order.size(), heads * d, "channel_order");
    expect_size(a.block_bits.size(), a.unit == "rope_block" ? heads * blocks : 0, "block_bits");
    expect_size(a.block_energy.size(), a.block_bits.size(), "block_energy");
    for (const float energy : a.block_energy)
      if (!(std::isfinite(energy) && energy >= 0.0f)) fail("block_energy: expected finite numbers of at least 0");
    for (const auto width : a.block_bits)
      if (width > 8) fail(fmt::format("block_bits: expected 0 to 8, found {}", width));
    int largest = 0;
    for (std::size_t h = 0; h < heads; ++h) {
      std::vector<bool> seen(d, false);
      for (std::size_t j = 0; j < d; ++j) {
        const int width = a.channel_bits[h * d + j];
        if (width > 8 || (j > 0 && width > a.channel_bits[h * d + j - 1]))
          fail(fmt::format("channel_bits: head {}: expected descending widths of 0 to 8, found {} at channel {}", h,
                           width, j));
        if (width > 0) std::visit(CheckWidth{*this, width}, plan.coder);
        largest = std::max(largest, width);
        const std::size_t source = a.channel_order[h * d + j];
        if (source >= d || seen[source])
          fail(fmt::format("channel_order: head {}: expected a permutation, found {} at channel {}", h, source, j));
        seen[source] = true;
      }
    }
    if (largest != code_bits(plan.coder))
      fail(fmt::format("bits: expected the largest width {}, found {}", largest, code_bits(plan.coder)));
    if (a.has_row_scale()) check_gains(a, heads, d);
    if (a.has_row_scale() && scale_rule(plan.coder) == ScaleRule::absmax)
      fail("scale_rule absmax does not go with one scale a row");
  }

  void check_gains(const BitAllocation& a, std::size_t heads, std::size_t d) const {
    expect_size(a.segment_gain.size(), heads * kGainWidths, "segment_gain");
    for (std::size_t h = 0; h < heads; ++h)
      for (int width = 1; width <= kGainWidths; ++width) {
        const float gain = a.segment_gain[h * kGainWidths + static_cast<std::size_t>(width) - 1];
        if (!(gain >= kLeastChannelScale && gain <= kMostChannelScale))
          fail(fmt::format("segment_gain: expected numbers from 2^-24 to 2^24, found {}", gain));
        const auto begin = a.channel_bits.begin() + static_cast<std::ptrdiff_t>(h * d);
        const bool used = std::find(begin, begin + static_cast<std::ptrdiff_t>(d), static_cast<std::uint8_t>(width)) !=
                          begin + static_cast<std::ptrdiff_t>(d);
        if (!used && gain != 1.0f)
          fail(fmt::format("segment_gain: head {}: expected 1 for width {}, which no channel has, found {}", h, width,
                           gain));
      }
  }

  void check_centroids(const TensorPlan& plan, std::size_t heads, int dim) const {
    const Centroids& c = *plan.centroids;
    if (c.count < 2 || c.count > 4096) fail(fmt::format("centroids: expected 2 to 4096, found {}", c.count));
    if (!plan.center.empty()) fail("centroids and center: expected one of both");
    if (is_exact(plan.coder)) fail("centroids do not go with coder exact");
    expect_size(c.values.size(), heads * static_cast<std::size_t>(c.count) * static_cast<std::size_t>(dim),
                "centroids");
    expect_finite(c.values, "centroids");
    if (!c.inertia.empty()) expect_size(c.inertia.size(), heads, "inertia");
    for (const double value : c.inertia)
      if (!(std::isfinite(value) && value >= 0.0))
        fail(fmt::format("inertia: expected finite numbers of at least 0, found {}", value));
  }
};

/// The checks of one coder; `heads` is H, the first extent of the plan's tensors: 1 if all heads share the map.
struct CheckCoder {
  const Checker& checker;
  bool mixed;
  std::size_t heads;
  int dim;

  void operator()(const ExactCoder&) const {
    if (mixed) checker.fail("mixed widths do not go with coder exact");
  }
  void operator()(const UniformCoder& coder) const {
    checker.check_groups(coder, mixed, dim);
    if (mixed && coder.levels == UniformLevels::affine) checker.fail("mixed widths do not go with coder affine");
    if (coder.levels == UniformLevels::affine)
      checker.check_rule(coder, {ScaleRule::minmax});
    else
      checker.check_rule(coder, {ScaleRule::absmax, ScaleRule::least_squares, ScaleRule::norm});
  }
  void operator()(const CodebookCoder& coder) const {
    checker.check_groups(coder, mixed, dim);
    checker.check_rule(coder, {ScaleRule::norm, ScaleRule::least_squares, ScaleRule::rms});
    checker.check_tables(coder, heads);
  }
  void operator()(const TrellisCoder& coder) const {
    checker.check_groups(coder, mixed, dim);
    checker.check_rule(coder, {ScaleRule::norm, ScaleRule::least_squares, ScaleRule::rms});
    checker.check_taps(coder, mixed);
  }
};

}  // namespace

void validate(const TensorPlan& plan, const LayerGeometry& geometry, int layer, Side side) {
  const Checker checker{layer, side};
  const int dim = geometry.dim(side);
  const auto heads = static_cast<std::size_t>(plan.rotation.scope == Scope::layer ? 1 : geometry.num_kv_heads);
  checker.check_rotation(plan.rotation, geometry.num_kv_heads, dim);
  checker.check_transform(plan, heads);
  if (!plan.center.empty()) checker.expect_size(plan.center.size(), heads * static_cast<std::size_t>(dim), "center");
  checker.expect_finite(plan.center, "center");
  std::visit(CheckCoder{checker, plan.allocation.has_value(), heads, dim}, plan.coder);
  if (plan.allocation) checker.check_allocation(plan, heads, dim);
  if (plan.centroids) checker.check_centroids(plan, heads, dim);
  checker.check_clip(plan, heads);
}

void validate(const LayerPlan& plan) {
  validate(plan.k, plan.geometry, plan.layer, Side::k);
  if (plan.v) validate(*plan.v, plan.geometry, plan.layer, Side::v);
}

double orthogonality_error(const Rotation& rotation, int dim) {
  if (rotation.kind != RotationKind::dense || !rotation.inverse.empty()) return 0.0;
  const auto d = static_cast<std::size_t>(dim);
  const std::size_t heads = rotation.matrix.size() / (d * d);
  std::vector<double> row(d);
  double worst = 0.0;
  for (std::size_t h = 0; h < heads; ++h) {
    const float* r = rotation.matrix.data() + h * d * d;
    for (std::size_t i = 0; i < d; ++i) {  // row i of R^T R: the sum runs over rows of R, which reads memory in order
      std::fill(row.begin(), row.end(), 0.0);
      for (std::size_t c = 0; c < d; ++c) {
        const double left = r[c * d + i];
        for (std::size_t j = 0; j < d; ++j) row[j] += left * r[c * d + j];
      }
      row[i] -= 1.0;
      for (const double value : row)
        if (std::isnan(value) || std::abs(value) > worst) worst = std::abs(value);
    }
  }
  return worst;
}

double transform_condition(const Rotation& rotation, int entry, int dim) {
  if (rotation.inverse.empty()) return 1.0;
  const auto d = static_cast<std::size_t>(dim), first = static_cast<std::size_t>(entry) * d * d;
  double total = 0.0;
  for (std::size_t i = 0; i < d; ++i) {
    double row = 0.0, column = 0.0;
    for (std::size_t j = 0; j < d; ++j) {
      const double a = rotation.matrix[first + i * d + j], b = rotation.inverse[first + j * d + i];
      row += a * a;
      column += b * b;
    }
    total += row * column;
  }
  // Every product is at least 1, so the root of their mean is too; rounding may leave it slightly below.
  return std::max(1.0, std::sqrt(total / static_cast<double>(d)));
}

double inverse_error(const Rotation& rotation, int entry, int dim) {
  if (rotation.inverse.empty()) return 0.0;
  const auto d = static_cast<std::size_t>(dim), first = static_cast<std::size_t>(entry) * d * d;
  std::vector<double> row(d);
  double worst = 0.0;
  for (std::size_t i = 0; i < d; ++i) {  // row i of A^-1 A
    std::fill(row.begin(), row.end(), 0.0);
    for (std::size_t c = 0; c < d; ++c) {
      const double left = rotation.inverse[first + i * d + c];
      for (std::size_t j = 0; j < d; ++j) row[j] += left * rotation.matrix[first + c * d + j];
    }
    row[i] -= 1.0;
    for (const double value : row)
      if (std::isnan(value) || std::abs(value) > worst) worst = std::abs(value);
  }
  return worst;
}

double BitAllocation::mean_bits() const {
  return std::accumulate(channel_bits.begin(), channel_bits.end(), 0.0) /
         static_cast<double>(std::max<std::size_t>(1, channel_bits.size()));
}

int index_bytes(const TensorPlan& plan) { return !plan.centroids ? 0 : plan.centroids->count <= 256 ? 1 : 2; }

RowLayout row_layout(const TensorPlan& plan, int kv_head, int dim) {
  const int bytes = scale_bytes(scale_type(plan.coder)), index = index_bytes(plan);
  if (plan.allocation) {
    const auto entry = static_cast<std::size_t>(plan.rotation.head_index(kv_head));
    return mixed_row_layout(plan.allocation->channel_bits.data() + entry * static_cast<std::size_t>(dim), dim, bytes,
                            index, plan.allocation->has_row_scale());
  }
  RowLayout layout;
  const int bits = code_bits(plan.coder);
  layout.num_segments = 1;
  layout.segments[0] = {bits, bits, 0, dim, 0};
  layout.numbers_offset = (dim * bits + 7) / 8;
  layout.num_numbers = group_size(plan.coder) == 0 ? 0 : dim / group_size(plan.coder) * numbers_per_group(plan.coder);
  layout.index_offset = layout.numbers_offset + layout.num_numbers * bytes;
  layout.index_bytes = index;
  layout.row_bytes = layout.index_offset + index;
  return layout;
}

int row_bytes(const TensorPlan& plan, int dim) {
  if (!plan.allocation) return row_layout(plan, 0, dim).row_bytes;
  const int heads = static_cast<int>(plan.allocation->channel_bits.size() / static_cast<std::size_t>(dim));
  int largest = 0;
  for (int h = 0; h < heads; ++h) largest = std::max(largest, row_layout(plan, h, dim).row_bytes);
  return common_row_bytes(largest);
}

CacheLayout cache_layout(const LayerPlan& plan) {
  return {plan.geometry.num_kv_heads, row_bytes(plan.k, plan.geometry.head_dim),
          plan.v ? row_bytes(*plan.v, plan.geometry.v_head_dim) : 0};
}

double mean_code_bits(const TensorPlan& plan) {
  return plan.allocation ? plan.allocation->mean_bits() : code_bits(plan.coder);
}

double effective_bits(const TensorPlan& plan, int dim, const Windows& windows, std::int64_t context) {
  if (context <= 0) return 0.0;
  const std::int64_t exact = std::min<std::int64_t>(context, windows.sink_tokens + windows.recent_tokens);
  const double coded_bits = 8.0 * row_bytes(plan, dim) / dim;
  return (static_cast<double>(exact) * 16.0 + static_cast<double>(context - exact) * coded_bits) /
         static_cast<double>(context);
}

}  // namespace kvq
