#include "calibrate_mpi/collect.h"

#include "calibrate_mpi/deal.h"
#include "calibrate_mpi/group_backend.h"
#include "common/progress.h"

#include <kvq/container/json.h>
#include <kvq/core/error.h>

#include <fmt/format.h>

#include <algorithm>

namespace kvq {

namespace {

namespace fs = std::filesystem;
using Entry = StatsOrigin::Entry;

/// The request for one of its layers.
CollectRequest one_layer(const CollectRequest& request, std::size_t index) {
  return {{request.layers[index]}, request.stats, request.tokens};
}

std::vector<double> work_of_layers(const CollectRequest& request) {
  std::vector<double> work;
  for (std::size_t i = 0; i < request.layers.size(); ++i) work.push_back(collect_work(one_layer(request, i)));
  return work;
}

/// Entries as text, for a message to rank 0.
std::string to_text(const std::vector<Entry>& entries) {
  Json list = Json::array();
  for (const Entry& entry : entries)
    list.push_back({{"path", entry.path.string()},
                    {"tokens", entry.tokens},
                    {"sequences", entry.sequences},
                    {"content_hash", entry.content_hash},
                    {"file_hash", entry.file_hash}});
  return list.dump();
}

std::vector<Entry> from_text(const std::string& text) {
  std::vector<Entry> entries;
  for (const Json& item : Json::parse(text))
    entries.push_back({.path = item["path"].get<std::string>(),
                       .index = 0,
                       .tokens = item["tokens"].get<std::int64_t>(),
                       .sequences = item["sequences"].get<std::int64_t>(),
                       .content_hash = item["content_hash"].get<std::string>(),
                       .file = {},
                       .stats = {},
                       .file_hash = item["file_hash"].get<std::string>()});
  return entries;
}

/// Collects the layers of a group as its leader.
/// @param say  with the work that is done
StatsOrigin lead(const Channel& channel, const Group& group, const Dump& dump, const CollectRequest& request,
                 const PartsFolder& parts, bool resume, const SayProgress& say) {
  StatsOrigin all;
  GroupBackend backend(channel, group.ranks);
  double done = 0.0;
  for (const std::size_t index : group.layers) {
    const CollectRequest one = one_layer(request, index);
    backend.begin_layer(one.layers.front().layer);
    StatsOrigin origin = collect_shards(dump, one, parts, resume, backend, [&](const CollectProgress& now) {
      CollectProgress of_group = now;
      of_group.done += done;
      if (say) say(of_group);
    });
    done += collect_work(one);
    all.header = origin.header;
    all.entries.push_back(std::move(origin.entries.front()));
    all.entries.back().stats.reset();  // one layer at a time is in memory
  }
  return all;
}

}  // namespace

StatsOrigin collect_in_groups(const Channel& channel, const Dump& dump, const CollectRequest& request,
                              const PartsFolder& parts, bool resume, bool quiet) {
  const std::vector<double> work = work_of_layers(request);
  const std::vector<Group> groups = deal(work, channel.ranks());
  const auto own = std::find_if(groups.begin(), groups.end(), [&](const Group& group) {
    return std::find(group.ranks.begin(), group.ranks.end(), channel.rank()) != group.ranks.end();
  });
  if (own->ranks.front() != channel.rank()) {
    serve_group(channel, own->ranks.front(), dump, request);
    return {};
  }
  if (channel.rank() != 0) {
    channel.send(0, to_text(lead(channel, *own, dump, request, parts, resume, {}).entries));
    return {};
  }
  double own_work = 0.0;
  for (const std::size_t index : own->layers) own_work += work[index];
  Progress progress(own_work, quiet);
  StatsOrigin origin = lead(channel, *own, dump, request, parts, resume, [&](const CollectProgress& now) {
    progress.update(now.done, fmt::format("layer {}, first of {} processes", now.layer, channel.ranks()));
  });
  std::vector<Entry> entries(request.layers.size());
  for (const Group& group : groups) {
    const int leader = group.ranks.front();
    std::vector<Entry> found = leader == 0 ? std::move(origin.entries) : from_text(channel.receive_text(leader));
    KVQ_ASSERT(found.size() == group.layers.size());
    for (std::size_t i = 0; i < found.size(); ++i) entries[group.layers[i]] = std::move(found[i]);
  }
  for (const Entry& entry : entries)
    if (!fs::exists(entry.path))
      throw Error{ErrorKind::io,
                  fmt::format("{}: another process wrote it, and this one does not see it", entry.path.string()),
                  "name an --output on a disk that all machines share"};
  origin.entries = std::move(entries);
  origin.header.model.layers = request.layers;
  return origin;
}

}  // namespace kvq
