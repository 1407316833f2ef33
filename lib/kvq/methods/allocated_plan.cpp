#include <kvq/compute/parallel.h>
#include <kvq/core/error.h>
#include <kvq/methods/allocated_plan.h>
#include <kvq/methods/make_coder.h>
#include <kvq/plan/baseline.h>
#include <kvq/solve/bit_budget.h>
#include <kvq/solve/spectral.h>
#include <kvq/solve/structured.h>

#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <map>
#include <numeric>
#include <utility>

namespace kvq {

/// Columns of the basis, or channels, that get one width together. Of equal gains the unit with the lower index wins.
struct Unit {
  std::vector<int> channels;
};

/// One head's problem: a basis (empty for the identity), units of its channels, and the score of each unit.
struct HeadProblem {
  std::vector<double> basis, spectrum;
  std::vector<Unit> units;
  std::vector<double> scores;
  std::vector<double> energy =
      {};  ///< of each column of the basis, uncentered if the rows are; empty: not asked for yet
};

namespace {

/// Diagonal of a moment along the columns of a basis, or along the channels if the basis is empty.
std::vector<double> energies(const std::vector<double>& moment, const std::vector<double>& basis, int dim) {
  const std::vector<double> along = basis.empty() ? moment : turned(moment, basis, dim);
  const auto d = static_cast<std::size_t>(dim);
  std::vector<double> diagonal(d);
  for (std::size_t j = 0; j < d; ++j) diagonal[j] = std::max(0.0, along[j * d + j]);
  return diagonal;
}

double sum_over(const Unit& unit, const std::vector<double>& energy) {
  double total = 0.0;
  for (const int j : unit.channels) total += energy[static_cast<std::size_t>(j)];
  return total;
}

std::vector<Unit> rope_units(const LayerGeometry& geometry) {
  std::vector<Unit> units;
  for (const RopeBlock& block : rope_blocks(geometry))
    units.push_back({block.second < 0 ? std::vector{block.first} : std::vector{block.first, block.second}});
  return units;
}

/// One unit for each channel.
std::vector<Unit> channel_units(int dim) {
  std::vector<Unit> units;
  units.reserve(static_cast<std::size_t>(dim));
  for (int j = 0; j < dim; ++j) units.push_back({{j}});
  return units;
}

}  // namespace

class SideAllocator::Impl {
 public:
  Impl(const SideView& view, const Options& options, Backend& backend)
      : view_(view),
        stats_(view.stats()),
        options_(options),
        side_(view.side()),
        center_(options.side(side_).center ? make_center(stats_, options, side_) : std::vector<float>{}),
        data_(fit_metrics(stats_, side_, !view.is_orthogonal())),
        request_{stats_, options, side_, coder_, data_, center_, backend} {}

  TensorPlan plan(const SideBudget& budget, const std::vector<Allocate>& how, bool with_error) {
    how_ = how;
    TensorPlan plan;
    plan.rotation.scope = options_.scope;
    plan.rotation.kind = RotationKind::dense;
    plan.rotation.recipe = recipe();
    plan.center = center_;
    plan.allocation =
        BitAllocation{.unit = any(Allocate::rope_block) ? "rope_block" : "channel", .score = score_name()};
    for (int h = 0; h < request_.heads(); ++h) add_head(plan, h, problem(h), budget);
    const std::vector<std::uint8_t>& bits = plan.allocation->channel_bits;
    if (std::all_of(bits.begin(), bits.end(), [](std::uint8_t b) { return b == 0; }))
      throw Error{ErrorKind::usage,
                  fmt::format("layer {} {}: rows of {} bytes hold no code of any channel", stats_.layer, name(side_),
                              budget.row_bytes),
                  "make the rows larger"};
    plan.coder = make_mixed_coder(options_, side_, *plan.allocation, dim());
    finish(plan, with_error);
    view_.compose(plan, options_);
    return plan;
  }

 private:
  int dim() const { return request_.dim(); }
  bool is_balanced(int h) const {
    return view_.kind(h) == TransformKind::balanced || view_.kind(h) == TransformKind::klt;
  }
  const RateLaw& law() const { return options_.coder_law ? traits_of(options_.side(side_).coder).law : paper_law(); }

  bool any(Allocate which) const { return std::find(how_.begin(), how_.end(), which) != how_.end(); }
  Allocate how(int h) const { return how_[static_cast<std::size_t>(h)]; }

  std::string score_name() const {
    if (any(Allocate::rope_block)) return to_string(options_.score);
    if (any(Allocate::channel) && !view_.is_orthogonal()) return "metric*covariance";
    if (any(Allocate::channel)) return side_ == Side::k ? "query_energy*key_energy" : "score_weighted_energy";
    return "equal";
  }
  std::string recipe() const {
    const std::string mixing = options_.mixing == Mixing::haar ? "Haar" : "S*H";
    std::string text;
    bool balanced = false;
    for (int h = 0; h < request_.heads(); ++h) balanced = balanced || (is_balanced(h) && how(h) == Allocate::channel);
    for (const auto& [which, factors] : {std::pair{Allocate::rope_block, "G*" + mixing},
                                         {Allocate::channel, (balanced ? "G*" : "U*G*") + mixing},
                                         {Allocate::none, mixing}})
      if (any(which)) text += (text.empty() ? "" : " or ") + factors;
    return text;
  }

  const HeadProblem& problem(int h) {
    const auto [it, fresh] = problems_.try_emplace({how(h), h});
    if (fresh) it->second = make_problem(h);
    return it->second;
  }

  /// A moment of each entry, as scoped_moment().
  const std::vector<std::vector<double>>& moment_of(Moment which, bool centered) {
    const auto [it, fresh] = moments_.try_emplace({which, centered});
    if (fresh) it->second = scoped_moment(request_, which, centered);
    return it->second;
  }

  HeadProblem make_problem(int h) {
    const auto entry = static_cast<std::size_t>(h);
    HeadProblem p;
    if (how(h) == Allocate::none) {
      p.units = channel_units(dim());
      p.scores.assign(p.units.size(), 1.0);
      return p;
    }
    const std::vector<double>& own = moment_of(side_ == Side::k ? Moment::key : Moment::value, true)[entry];
    if (how(h) == Allocate::channel && is_balanced(h)) {
      // Covariance and metric are diagonal, up to damping, and descend along the channels.
      p.units = channel_units(dim());
      const std::vector<double> energy = energies(own, {}, dim()), price = energies(metric(h), {}, dim());
      for (std::size_t j = 0; j < p.units.size(); ++j) p.scores.push_back(energy[j] * price[j]);
      return p;
    }
    if (how(h) == Allocate::channel) {
      const Moment target = side_ == Side::k                             ? Moment::query
                            : stats_.moments.count(Moment::scored_value) ? Moment::scored_value
                                                                         : Moment::value;
      if (bases_.empty()) bases_ = eigenbases(moment_of(target, side_ == Side::v), dim(), request_.backend);
      const EigenPairs& pairs = bases_[entry];
      p.basis = pairs.vectors;
      p.spectrum = pairs.values;
      p.units = channel_units(dim());
      const std::vector<double> energy = energies(own, p.basis, dim());
      for (std::size_t j = 0; j < p.units.size(); ++j)
        p.scores.push_back(energy[j] * (side_ == Side::k ? std::max(0.0, pairs.values[j]) : 1.0));
      return p;
    }
    p.units = rope_units(stats_.geometry);
    const std::vector<double> key = energies(own, {}, dim()),
                              query = energies(moment_of(Moment::query, false)[entry], {}, dim());
    for (const Unit& unit : p.units)
      p.scores.push_back(block_score(options_.score, sum_over(unit, query), sum_over(unit, key)));
    return p;
  }

  /// Metric of entry h: the sum of the metrics of the heads that share it.
  std::vector<double> metric(int h) const {
    const std::vector<std::size_t> members = request_.members(h);
    std::vector<double> mean = data_[members.front()].metric;
    KVQ_ASSERT(!mean.empty());
    for (std::size_t m = 1; m < members.size(); ++m)
      for (std::size_t i = 0; i < mean.size(); ++i) mean[i] += data_[members[m]].metric[i];
    return mean;
  }

  std::vector<std::uint8_t> widths(const HeadProblem& p, const SideBudget& budget) const {
    const int per_unit = static_cast<int>(p.units.front().channels.size());
    // With one scale a row, pages store codes in whole words and the scale behind them.
    const int scale = scale_bytes(options_.side(side_).scale_type),
              beside = options_.scales == ScaleScope::row ? scale : 0,
              max_bits = budget.max_bits > 0 ? budget.max_bits : options_.max_bits;
    if (budget.row_bytes > 0)
      return byte_allocation(p.scores,
                             {
                                 .row_bytes = (budget.row_bytes - beside) / kRowWord * kRowWord + beside,
                                 .scale_bytes = scale,
                                 .index_bytes = 0,
                                 .channels_per_block = per_unit,
                                 .min_bits = options_.min_bits,
                                 .max_bits = max_bits,
                                 .row_scale = options_.scales == ScaleScope::row,
                             },
                             law());
    const auto count = static_cast<int>(p.units.size());
    return greedy_allocation(p.scores, total_bits(budget.bits, count), options_.min_bits, max_bits, law());
  }

  void add_head(TensorPlan& plan, int h, const HeadProblem& p, const SideBudget& budget) {
    BitAllocation& a = *plan.allocation;
    const std::vector<std::uint8_t> bits = widths(p, budget);
    a.objective += allocation_objective(p.scores, bits, law());
    const int spent = std::accumulate(bits.begin(), bits.end(), 0);
    a.free_objective += allocation_objective(
        p.scores, greedy_allocation(p.scores, spent, options_.min_bits, options_.max_bits, law()), law());
    if (how(h) != Allocate::rope_block && any(Allocate::rope_block)) {
      const auto blocks = static_cast<std::size_t>(num_blocks(dim()));
      a.block_bits.insert(a.block_bits.end(), blocks, *std::min_element(bits.begin(), bits.end()));
      a.block_energy.insert(a.block_energy.end(), blocks, 0.0f);
    }
    if (how(h) == Allocate::rope_block) {
      a.block_bits.insert(a.block_bits.end(), bits.begin(), bits.end());
      a.block_energy.insert(a.block_energy.end(), p.scores.begin(), p.scores.end());
    }
    std::vector<std::size_t> order(bits.size());
    std::iota(order.begin(), order.end(), std::size_t{0});
    std::sort(order.begin(), order.end(),
              [&](std::size_t x, std::size_t y) { return bits[x] != bits[y] ? bits[x] > bits[y] : x < y; });
    std::vector<int> sources;
    for (const std::size_t unit : order)
      for (const int channel : p.units[unit].channels) {
        sources.push_back(channel);
        a.channel_bits.push_back(bits[unit]);
        a.channel_order.push_back(static_cast<std::uint16_t>(channel));
      }
    add_rotation(plan.rotation, h, p, sources, std::span(a.channel_bits).last(sources.size()));
    if (options_.scales == ScaleScope::row) add_gains(plan, h, sources);
  }

  /// Energy of each channel of the rows that the coder sees, before channels of one width are mixed.
  std::vector<double> coded_energy(int h, const std::vector<int>& sources, const Rotation& rotation) {
    const auto d = static_cast<std::size_t>(dim()), entry = static_cast<std::size_t>(h);
    const std::vector<double>& moment =
        moment_of(side_ == Side::k ? Moment::key : Moment::value, options_.side(side_).center)[entry];
    if (how(h) == Allocate::none) {  // widths were given to channels of the mixed row
      const auto* mixing = rotation.matrix.data() + entry * d * d;
      return energies(moment, {mixing, mixing + d * d}, dim());
    }
    std::vector<double>& along = problems_.at({how(h), h}).energy;
    if (along.empty()) along = energies(moment, problem(h).basis, dim());
    std::vector<double> gathered;
    for (const int source : sources) gathered.push_back(along[static_cast<std::size_t>(source)]);
    return gathered;
  }

  /// The gain of each segment: the root mean square of its channels.
  void add_gains(TensorPlan& plan, int h, const std::vector<int>& sources) {
    BitAllocation& a = *plan.allocation;
    const std::vector<double> energy = coded_energy(h, sources, plan.rotation);
    const auto bits = std::span(a.channel_bits).last(sources.size());
    for (int width = 1; width <= kGainWidths; ++width) {
      double sum = 0.0;
      int count = 0;
      for (std::size_t j = 0; j < bits.size(); ++j)
        if (bits[j] == width) sum += energy[j], ++count;
      const float rms = count == 0 ? 1.0f : static_cast<float>(std::sqrt(sum / count));
      a.segment_gain.push_back(std::clamp(rms, kLeastChannelScale, kMostChannelScale));
    }
  }

  /// Gathers the columns of the basis by width and mixes each group by its own orthogonal matrix.
  void add_rotation(Rotation& rotation, int h, const HeadProblem& p, const std::vector<int>& sources,
                    std::span<const std::uint8_t> bits) {
    const auto d = static_cast<std::size_t>(dim());
    std::vector<double> mixing(d * d, 0.0);
    for (std::size_t first = 0; first < d;) {
      std::size_t end = first;
      // With Allocate::none the whole row is mixed, so that one bit more does not favor any source channel.
      while (end < d && (how(h) == Allocate::none || bits[end] == bits[first])) ++end;
      const std::size_t n = end - first;
      const std::vector<double>& block = mixing_matrix(static_cast<int>(n), h, bits[first]);
      for (std::size_t i = 0; i < n; ++i)
        for (std::size_t j = 0; j < n; ++j) mixing[(first + i) * d + first + j] = block[i * n + j];
      first = end;
    }
    const std::vector<double> matrix = gathered_product(p.basis, sources, mixing);
    rotation.matrix.insert(rotation.matrix.end(), matrix.begin(), matrix.end());
    if (p.basis.empty() || any(Allocate::none) || !view_.is_orthogonal())
      return;  // the plan keeps eigenbases only if all heads have one
    rotation.target = side_ == Side::k                             ? "query"
                      : stats_.moments.count(Moment::scored_value) ? "scored_value"
                                                                   : "value";
    rotation.eigenbasis.insert(rotation.eigenbasis.end(), p.basis.begin(), p.basis.end());
    rotation.spectrum.insert(rotation.spectrum.end(), p.spectrum.begin(), p.spectrum.end());
  }

  /// The basis (empty: the identity) with its columns in the order of `sources`, times `mixing`.
  std::vector<double> gathered_product(const std::vector<double>& basis, const std::vector<int>& sources,
                                       const std::vector<double>& mixing) const {
    const auto d = static_cast<std::size_t>(dim());
    std::vector<double> result(d * d);
    for (std::size_t place = 0; place < d; ++place) {
      const auto source = static_cast<std::size_t>(sources[place]);
      if (basis.empty())
        std::copy_n(mixing.begin() + static_cast<std::ptrdiff_t>(place * d), d,
                    result.begin() + static_cast<std::ptrdiff_t>(source * d));
      else
        for (std::size_t i = 0; i < d; ++i) result[i * d + place] = basis[i * d + source];
    }
    return basis.empty() ? result : product(result, mixing, dim());
  }

  /// Haar, or random signs and a Hadamard where n is a power of two; one stream for each (layer, head, side, width).
  const std::vector<double>& mixing_matrix(int n, int h, int width) {
    const int stream = 1024 + kvq::stream(h, side_) * 16 + (how(h) == Allocate::none ? 9 : width);
    const auto [it, fresh] = mixing_.try_emplace({n, stream});
    if (fresh) it->second = make_mixing(n, stream);
    return it->second;
  }

  std::vector<double> make_mixing(int n, int stream) const {
    if (options_.mixing == Mixing::haar || hadamard_order(n) != n)
      return haar_matrix(n, options_.seed, stats_.layer, stream);
    std::vector<double> matrix = block_hadamard_matrix(n, n);
    const std::vector<std::int8_t> signs = random_signs(n, options_.seed, stats_.layer, stream);
    for (std::size_t i = 0; i < signs.size(); ++i)
      for (std::size_t j = 0; j < signs.size(); ++j) matrix[i * signs.size() + j] *= signs[i];
    return matrix;
  }

  /// Fills the coder's tables and, if asked for, the errors before and after.
  void finish(TensorPlan& plan, bool with_error) {
    const bool needs_rows = with_error || fit_needs_rows(plan.coder);
    if (!needs_rows) return;
    const auto d = static_cast<std::size_t>(dim());
    if (rows_.empty()) rows_ = fit_data(view_);
    std::vector<std::vector<RotatedData>> rotated(static_cast<std::size_t>(request_.heads()));
    parallel_for(request_.heads(), [&](std::int64_t index) {
      const auto h = static_cast<std::size_t>(index);
      const auto center = center_.empty() ? std::span<const float>{} : std::span(center_).subspan(h * d, d);
      const std::vector<double> matrix = rotation_matrix(plan.rotation, static_cast<int>(h), dim());
      for (const std::size_t member : request_.members(static_cast<int>(h)))
        rotated[h].push_back(rotate(rows_[member], matrix, center));
    });
    fit_tables(plan, options_.side(side_).fitted, rotated, request_.backend);
    if (!with_error) return;
    std::vector<std::array<double, 3>> sums(rotated.size());
    const std::vector<FitData> plain_data = view_.is_orthogonal() ? rows_ : fit_data(view_.original(), side_, true);
    const UniformCoder uniform = plain_baseline(row_bytes(plan, dim()), dim());
    parallel_for(static_cast<std::int64_t>(rotated.size()), [&](std::int64_t index) {
      const auto h = static_cast<std::size_t>(index);
      const RowCodec codec(plan, static_cast<int>(h), dim());
      sums[h][2] = coding_cost_of(rotated[h], codec, request_.backend);
      for (const std::size_t member : request_.members(static_cast<int>(h))) {
        if (view_.is_orthogonal()) {
          const RotatedData raw = rotate(plain_data[member], {}, {});
          sums[h][0] += energy(raw);
          sums[h][1] += coding_cost_of(std::span(&raw, 1), RowCodec(uniform, 1.0, dim()), request_.backend);
        } else {
          sums[h][0] += energy(plain_data[member]);
          sums[h][1] += coding_cost(plain_data[member], RowCodec(uniform, 1.0, dim()));
        }
      }
    });
    double total = 0.0, before = 0.0, after = 0.0;
    for (const auto& sum : sums) {
      total += sum[0];
      before += sum[1];
      after += sum[2];
    }
    if (!(total > 0.0))
      throw Error{ErrorKind::numerical,
                  fmt::format("layer {} {}: the sampled rows have no energy under the error metric", stats_.layer,
                              name(side_))};
    plan.error =
        FitError{metric_name(view_), before / total, after / total, BaselineCodes{uniform.bits, uniform.group_size}};
  }

  const SideView& view_;
  const LayerStats& stats_;  ///< of the view
  const Options& options_;
  Side side_;
  std::vector<Allocate> how_;
  Coder coder_ = ExactCoder{};
  std::vector<float> center_;
  std::vector<FitData> data_;  ///< metrics
  std::vector<FitData> rows_;  ///< with rows; empty: not asked for yet
  RotationRequest request_;
  std::vector<EigenPairs> bases_;  ///< [H] of the moment that gives channels; empty: not asked for yet
  std::map<std::pair<Moment, bool>, std::vector<std::vector<double>>> moments_;  ///< by moment and centering
  std::map<std::pair<Allocate, int>, HeadProblem> problems_;                     ///< by head
  std::map<std::pair<int, int>, std::vector<double>> mixing_;                    ///< by order and stream
};

SideAllocator::SideAllocator(const SideView& view, const Options& options, Backend& backend)
    : impl_(std::make_unique<Impl>(view, options, backend)) {}
SideAllocator::~SideAllocator() = default;

TensorPlan SideAllocator::plan(const SideBudget& budget, const std::vector<Allocate>& how, bool with_error) {
  return impl_->plan(budget, how, with_error);
}

double block_score(BlockScore score, double q, double k) {
  switch (score) {
    case BlockScore::qk_avg: return 0.5 * (q + k);
    case BlockScore::qk_max: return std::max(q, k);
    case BlockScore::qk_product: return std::sqrt(q * k);
    case BlockScore::k_only: return k;
    case BlockScore::q_only: return q;
    case BlockScore::qk_energy_product: return q * k;
  }
  return 0.0;
}

TensorPlan allocate_side(const SideView& view, const Options& options, const SideBudget& budget,
                         const std::vector<Allocate>& how, bool with_error, Backend& backend) {
  return SideAllocator(view, options, backend).plan(budget, how, with_error);
}

RotationTensors allocation_tensors(const Options& options, Side side, int dim) {
  const Allocate allocate = options.side(side).allocate;
  const bool allocated = allocate != Allocate::none || options.budget_bits || options.budget_bytes;
  if (!allocated && options.mixing == Mixing::hadamard && (dim & (dim - 1)) == 0) return {.signs = true};
  return {.matrix = true, .basis = allocate == Allocate::channel, .signs = false};  // an upper bound of kvq
}

std::set<Moment> allocation_needs(const Options& options) {
  std::set<Moment> needs = common_needs(options);
  needs.insert(Moment::scored_value);
  return needs;
}

}  // namespace kvq
