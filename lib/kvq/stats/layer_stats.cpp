#include <kvq/core/error.h>
#include <kvq/stats/layer_stats.h>
#include <kvq/stats/token_ranges.h>

#include <xxhash.h>

namespace kvq {

const char* to_string(Moment moment) {
  switch (moment) {
    case Moment::query: return "query";
    case Moment::key: return "key";
    case Moment::value: return "value";
    case Moment::scored_value: return "scored_value";
    case Moment::scored_query: return "scored_query";
    case Moment::sst: return "sst";
  }
  return "?";
}

std::optional<Moment> moment_from_string(std::string_view name) {
  for (const Moment moment : kAllMoments)
    if (name == to_string(moment)) return moment;
  return std::nullopt;
}

Side side_of(Moment moment) {
  const bool of_values = moment == Moment::value || moment == Moment::scored_value || moment == Moment::sst;
  return of_values ? Side::v : Side::k;
}

const char* to_string(Queries queries) {
  switch (queries) {
    case Queries::all: return "all";
    case Queries::generated: return "generated";
    case Queries::prompt: return "prompt";
  }
  return "?";
}

std::optional<Queries> queries_from_string(std::string_view name) {
  for (const Queries queries : kAllQueries)
    if (name == to_string(queries)) return queries;
  return std::nullopt;
}

const std::vector<MomentSum>& LayerStats::moment(Moment which) const {
  const auto it = moments.find(which);
  if (it == moments.end())
    throw Error{ErrorKind::usage, fmt::format("layer {}: the statistics hold no {} moment", layer, to_string(which)),
                "collect it: run kvq-calibrate on the dump with the options of this decision"};
  return it->second;
}

namespace {

std::string joined_hash(const std::string& a, const std::string& b) {
  const std::string both = a + "\n" + b;
  const XXH128_hash_t hash = XXH3_128bits(both.data(), both.size());
  return fmt::format("xxh3-128:{:016x}{:016x}", hash.high64, hash.low64);
}

}  // namespace

void merge(LayerStats& into, const LayerStats& other, std::int64_t sample_tokens) {
  const auto refuse = [&](const char* what) {
    throw Error{ErrorKind::bad_input, fmt::format("layer {}: cannot merge statistics: {} differ", into.layer, what)};
  };
  if (into.layer != other.layer) refuse("layers");
  if (into.geometry != other.geometry || into.has_values != other.has_values) refuse("geometries");
  if (into.o_proj_metric != other.o_proj_metric) refuse("o_proj metrics");
  if (into.moments.size() != other.moments.size()) refuse("collected moments");
  if (into.moments.count(Moment::sst))
    throw Error{
        ErrorKind::unsupported,
        fmt::format("layer {}: `sst` weights need the joint query moment, so shards by sequences cannot be merged",
                    into.layer),
        "collect `sst` from all files in one run, or use --target-v scored_value"};
  if (const auto both = find_overlap(into.ranges, other.ranges))
    throw Error{ErrorKind::bad_input, fmt::format("layer {}: cannot merge statistics: both hold tokens {} to {} of {}",
                                                  into.layer, both->first, both->first + both->count - 1, both->dump)};
  for (auto& [which, sums] : into.moments) {
    const auto it = other.moments.find(which);
    if (it == other.moments.end() || it->second.size() != sums.size()) refuse("collected moments");
    for (std::size_t h = 0; h < sums.size(); ++h) sums[h].add(it->second[h]);
  }
  // The larger set of held-out tokens stays (the first of equal ones); no sum contains either set.
  if (other.held_out && (!into.held_out || other.held_out->count() > into.held_out->count())) {
    into.held_out = other.held_out;
    into.held_out->token += into.tokens;
  }
  // The same holds for golden tokens. Of equally many the first stay, so that the result is determined.
  if (other.golden && (!into.golden || other.golden->count > into.golden->count)) {
    into.golden = other.golden;
    into.golden->first += into.tokens;
  }
  into.sample = merge_samples(into.sample, other.sample, into.tokens, sample_tokens);
  // Without ranges on one side nothing is known of the sum.
  if (into.ranges.empty() || other.ranges.empty()) {
    into.ranges.clear();
  } else {
    append_ranges(into.ranges, other.ranges);
  }
  into.tokens += other.tokens;
  into.sequences += other.sequences;
  into.content_hash = joined_hash(into.content_hash, other.content_hash);
}

std::vector<double> mean_moment(const MomentSum& sum, const std::vector<double>& center) {
  std::vector<double> mean(sum.sum);
  const auto d = static_cast<std::size_t>(sum.dim);
  for (std::size_t i = 0; i < d; ++i)
    for (std::size_t j = 0; j < d; ++j) {
      double& m = mean[i * d + j];
      m /= sum.weight;
      // E (x - c)(x - c)^T = E x x^T - m c^T - c m^T + c c^T with m = E x
      if (!center.empty())
        m += center[i] * center[j] - (sum.mean[i] * center[j] + center[i] * sum.mean[j]) / sum.weight;
    }
  return mean;
}

std::vector<double> mean_vector(const MomentSum& sum) {
  std::vector<double> mean(sum.mean);
  for (double& value : mean) value /= sum.weight;
  return mean;
}

}  // namespace kvq
