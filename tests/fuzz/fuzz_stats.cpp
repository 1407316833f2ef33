// libFuzzer: the manifest of a statistics file, its tensors and their data, as in container_input.h, with the right
// content hash. Opening and loading every layer either works or ends in a clean Error, and a loaded layer has as many
// rows and tokens as it states. Seeds: make_stats_seeds.

#include <kvq/core/error.h>
#include <kvq/stats/stats_file.h>
#include <kvq/stats/token_ranges.h>

#include "container_input.h"

#include <unistd.h>

#include <cstdlib>
#include <filesystem>

using namespace kvq;

namespace {

/// StatsFile needs a path, so the input is written to a file; TMPDIR=/dev/shm keeps it in memory.
const std::filesystem::path& input_path() {
  static const auto path = std::filesystem::temp_directory_path() / fmt::format("kvq-fuzz-{}.safetensors", ::getpid());
  return path;
}

void write_input(const std::vector<std::byte>& bytes) {
  std::ofstream(input_path(), std::ios::binary)
      .write(reinterpret_cast<const char*>(bytes.data()), static_cast<std::streamsize>(bytes.size()));
}

void expect_rows(const SampledRows& rows, std::int64_t count) {
  for (int h = 0; h < rows.heads; ++h)
    if (rows.head(h).size() != static_cast<std::size_t>(count * rows.dim)) std::abort();
}

void use(const LayerStats& stats) {
  if (!stats.ranges.empty() && total_tokens(stats.ranges) != stats.tokens) std::abort();
  for (const SampledRows* rows : {&stats.sample.q, &stats.sample.k, &stats.sample.v})
    expect_rows(*rows, stats.sample.size());
  for (int h = 0; h < stats.geometry.num_kv_heads; ++h) stats.sample.weights(h, stats.geometry.num_kv_heads);
  for (const auto& [which, sums] : stats.moments)
    for (const MomentSum& sum : sums) mean_moment(sum);
  if (!stats.held_out) return;
  expect_rows(stats.held_out->q, static_cast<std::int64_t>(stats.held_out->query.size()));
  for (const SampledRows* rows : {&stats.held_out->k, &stats.held_out->v}) expect_rows(*rows, stats.held_out->count());
}

void load_layers(const StatsFile& file) {
  for (std::size_t i = 0; i < file.header().model.layers.size(); ++i) {
    try {
      use(file.load(i));
    } catch (const Error& error) {
      if (error.kind() == ErrorKind::internal) throw;  // libFuzzer reports a bug as a crash
    }
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size > (1u << 16)) return 0;
  try {
    write_input(fuzz::hashed_container_of(fuzz::parse_text(data, size), "kvq-stats"));
    load_layers(StatsFile::open(input_path()));
  } catch (const Error& error) {
    if (error.kind() == ErrorKind::internal) throw;
  }
  std::filesystem::remove(input_path());
  return 0;
}
