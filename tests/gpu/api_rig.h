#pragma once

#include <kvq/artifact/artifact.h>
#include <kvq/runtime/device_memory.h>
#include <kvq/runtime/paged_cache.h>
#include <kvq/runtime.hpp>

#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

/// A small engine that uses the public interface only.
namespace kvq::test {

/// Options of a plan with decode; with prefill if queries is above 0.
kvq_plan_options plan_options(std::int32_t batch, std::int32_t queries = 0, std::int32_t keys = 0);

/// @return  [rows, width] numbers between -2 and 2 in bfloat16, which depend on the seed alone
std::vector<std::uint16_t> random_rows(int rows, int width, unsigned seed);

/// A served artifact in a file, loaded and uploaded.
struct Engine {
  /// @param fold  KVQ_FOLD_... of the layers whose keys have scales
  explicit Engine(const Artifact& artifact, kvq_model_options options = runtime::init<kvq_model_options>(),
                  std::uint32_t fold = 0);
  ~Engine();
  Engine(const Engine&) = delete;

  std::string path;
  std::unique_ptr<runtime::Model> model;
  DeviceMemory memory;
  std::unique_ptr<runtime::DeviceModel> device_model;
};

/// A PagedCache with plans and a workspace for one layer, and rows that depend on the token and the layer's plan alone.
class LayerRunner {
 public:
  LayerRunner(const Engine& engine, std::int32_t layer, const runtime::PagedCacheOptions& options, kvq_stream stream);

  /// Grows sequences, writes rows and attends. The row of a new token depends on its seed and position.
  /// @return  [B, Hq, D] attention results of the batch, in bfloat16; empty if there are not enough pages
  std::vector<std::uint16_t> step(std::span<const Growth> batch);
  /// The two parts of step(), without reading the results, which are then in `out`.
  bool begin(std::span<const Growth> batch);
  void run();
  std::vector<std::uint16_t> results();

  std::vector<float> lse();

  /// From here on keys and queries are those of weights with folded key scales.
  void scale_keys() { scaled_ = true; }

  runtime::PagedCache cache;
  kvq_layer_info info;
  std::map<std::int32_t, std::uint64_t> rows = {};  ///< seed of each sequence's rows
  /// Seeds of the tokens of a sequence by position, in place of one seed for all.
  std::map<std::int32_t, std::vector<std::int32_t>> tokens = {};
  std::uint64_t seed_of(std::int32_t sequence, std::int64_t position) const;

  /// The rows of a token, [Hkv, D] bfloat16, and the queries at a length, [Hq, D]. Rows are chosen such that their
  /// codes are certain: no channel is so near an edge that rounding errors of the rotation could change its code.
  std::vector<std::uint16_t> key(std::uint64_t seed, std::int64_t position) const;
  std::vector<std::uint16_t> value(std::uint64_t seed, std::int64_t position) const;
  std::vector<std::uint16_t> query(std::uint64_t seed, std::int64_t length) const;

 private:
  std::int32_t layer_;
  const LayerPlan& plan_;
  kvq_stream stream_;
  runtime::Plan kernels_;
  DeviceMemory workspace_, out_, lse_, q_, k_, v_;
  std::size_t batch_ = 0;
  bool scaled_ = false;
};

/// @throws std::runtime_error with the message unless status is KVQ_OK
void expect_ok(kvq_status status, const kvq_error& error);

}  // namespace kvq::test
