#include <kvq/core/error.h>
#include <kvq/stats/stats_overlap.h>
#include <kvq/stats/token_ranges.h>

#include <algorithm>
#include <iterator>

namespace kvq {

namespace {

[[noreturn]] void refuse_overlap(int layer, const StatsFile& file, const StatsFile& first, const std::string& what) {
  throw Error{ErrorKind::bad_input, fmt::format("{}: layer {}: {} {}", file.name(), layer, what, first.name()),
              "tokens would count double: name each part of a dump once, and not with a file that contains it"};
}

/// Refuses a token that is in both files.
/// @return  whether both files say which tokens they hold; if not, only sampled tokens and whole files are compared
bool expect_no_common_token(int layer, const LayerPlace& place, const LayerPlace& first) {
  const StatsFile &file = *place.file, &other = *first.file;
  if (file.content_hash(place.index) == other.content_hash(first.index))
    refuse_overlap(layer, file, other, "the same dump data as in");
  if (!file.ranges(place.index).empty() && !other.ranges(first.index).empty()) {
    if (const auto both = find_overlap(file.ranges(place.index), other.ranges(first.index)))
      refuse_overlap(layer, file, other,
                     fmt::format("tokens {} to {} of dump {} are also in", both->first, both->first + both->count - 1,
                                 both->dump));
    return true;
  }
  // A key follows from a token's sequence and place: equal keys are of equal tokens.
  const std::vector<std::int64_t> keys = file.sample_keys(place.index), others = other.sample_keys(first.index);
  std::vector<std::int64_t> common;
  std::ranges::set_intersection(keys, others, std::back_inserter(common));
  if (!common.empty()) refuse_overlap(layer, file, other, fmt::format("{} sampled tokens are also in", common.size()));
  return false;
}

}  // namespace

void expect_other_tokens(const std::map<int, std::vector<LayerPlace>>& layers, const SayWarning& warn) {
  const StatsFile* unknown = nullptr;
  for (const auto& [layer, places] : layers)
    for (std::size_t i = 1; i < places.size(); ++i)
      for (std::size_t j = 0; j < i; ++j)
        if (!expect_no_common_token(layer, places[i], places[j]))
          unknown = places[i].file->ranges(places[i].index).empty() ? places[i].file : places[j].file;
  if (unknown != nullptr && warn)
    warn(
        fmt::format("{}: statistics before version 1.5 do not say which tokens they hold: no overlap was found, but "
                    "overlapping parts of one sequence cannot be found",
                    unknown->name()));
}

}  // namespace kvq
