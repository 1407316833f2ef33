#include "common/cli.h"
#include "common/describe.h"
#include "common/wrong_file.h"
#include "selftest/report.h"

#include <kvq/artifact/artifact.h>
#include <kvq/core/error.h>
#include <kvq/plan/layer_pages.h>
#include <kvq/runtime.hpp>

#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include <cstddef>
#include <cstdio>

namespace kvq {

namespace {

struct SelftestFlags {
  std::string artifact, activation = "bf16";
  int device = 0, page_size = 64;
  bool json = false;
};

ToolText selftest_text() {
  return {
      .name = "kvq-selftest",
      .summary = "replays the golden rows of an artifact on a GPU",
      .description =
          "Replays an artifact's golden rows through the interface that engines use: writes the rows and compares the "
          "bytes of the pages, then attends over the expected bytes and compares the result. Exit code 5 also means "
          "that no layer failed but some could not be run: no GPU, no golden rows, a format without kernel. Without a "
          "GPU, kvq-inspect --verify codes the golden rows anew.",
      .examples = {{"kvq-selftest out.safetensors", "on the first GPU"},
                   {"kvq-selftest out.safetensors --device 3 --json", "another GPU, for programs"},
                   {"kvq-selftest out.safetensors --activation fp16", "a model in fp16"}},
      .first_flags = {"--device", "--page-size", "--activation", "--json"},
      .words = {{"--page-size", {"16", "32", "64", "128"}}, {"--activation", {"bf16", "fp16"}}},
  };
}

void add_flags(CLI::App& app, SelftestFlags& f) {
  app.add_option("artifact", f.artifact, "artifact of kvq-calibrate")->required()->type_name("FILE");
  app.add_option("--device", f.device, "number of the CUDA device")
      ->check(whole_number(0, 1023))
      ->capture_default_str();
  app.add_option("--page-size", f.page_size, "tokens of a page")
      ->check(one_of({"16", "32", "64", "128"}))
      ->capture_default_str();
  app.add_option("--activation", f.activation, "type of queries, rows and results")
      ->check(one_of({"bf16", "fp16"}))
      ->type_name("NAME")
      ->capture_default_str();
  app.add_flag("--json", f.json, "one JSON document on stdout (formats/selftest.schema.json)");
}

/// Makes the device current and returns its name.
std::string use_device(int index) {
  int count = 0;
  cudaError_t error = cudaGetDeviceCount(&count);
  if (error != cudaSuccess || index >= count)
    throw Error{ErrorKind::unsupported,
                count > 0 ? fmt::format("no CUDA device {}, found {}", index, count)
                          : fmt::format("no CUDA device: {}", cudaGetErrorString(error)),
                "kvq-inspect --verify codes the golden rows anew, without one"};
  cudaDeviceProp properties;
  error = cudaSetDevice(index);
  if (error == cudaSuccess) error = cudaGetDeviceProperties(&properties, index);
  if (error != cudaSuccess)
    throw Error{ErrorKind::unsupported, fmt::format("CUDA device {}: {}", index, cudaGetErrorString(error))};
  return properties.name;
}

Error as_error(const runtime::Error& error) {
  switch (error.status()) {
    case KVQ_IO: return {ErrorKind::bad_input, error.what()};
    case KVQ_CUDA:  // for example no code for this architecture, or no memory
    case KVQ_UNSUPPORTED: return {ErrorKind::unsupported, error.what()};
    case KVQ_MISMATCH: return {ErrorKind::check_failed, error.what()};
    default: return {ErrorKind::internal, error.what()};
  }
}

std::string format_of(const TensorPlan& plan, const TileSide& side) { return side_name(side, has_bfloat_scales(plan)); }

kvq_layer_geometry claim_of(const LayerPlan& plan) {
  auto claim = runtime::init<kvq_layer_geometry>();
  const LayerGeometry& g = plan.geometry;
  claim.num_q_heads = g.num_q_heads, claim.num_kv_heads = g.num_kv_heads;
  claim.head_dim = g.head_dim, claim.v_head_dim = g.v_head_dim, claim.sliding_window = g.sliding_window;
  return claim;
}

/// @param why  reason; the layer's number is removed from it, because the table shows the layer
kvq_selftest_layer not_run(int layer, std::string why) {
  const std::string name = fmt::format("layer {} ", layer);
  for (std::size_t at; (at = why.find(name)) != std::string::npos;) why.erase(at, name.size());
  auto result = runtime::init<kvq_selftest_layer>();
  result.layer = layer, result.status = result.write_status = result.decode_status = KVQ_UNSUPPORTED;
  std::snprintf(result.message, sizeof result.message, "%s", why.c_str());
  return result;
}

/// Loads, uploads and tests consecutive layers. The geometry that the runtime checks against comes from the artifact
/// itself.
std::vector<kvq_selftest_layer> replay(const SelftestFlags& flags, const Artifact& artifact, int first, int count) {
  std::vector<kvq_layer_geometry> claims(static_cast<std::size_t>(artifact.model.num_layers),
                                         claim_of(artifact.layers.front()));
  for (const LayerPlan& plan : artifact.layers) claims[static_cast<std::size_t>(plan.layer)] = claim_of(plan);
  auto options = runtime::init<kvq_model_options>();
  options.num_layers = options.num_geometries = artifact.model.num_layers;
  options.geometry = claims.data();
  options.first_layer = first, options.layer_count = count;
  options.page_size = flags.page_size;
  options.activation = flags.activation == "bf16" ? KVQ_BF16 : KVQ_FP16;
  try {
    return runtime::Model(flags.artifact, options).selftest(nullptr);
  } catch (const runtime::Error& error) {
    throw as_error(error);
  }
}

SelftestReport test(const SelftestFlags& flags, const Artifact& artifact) {
  SelftestReport report{
      .artifact = flags.artifact,
      .model = artifact.model.name,
      .method = artifact.calibration.method,
      .device = flags.device,
      .gpu = use_device(flags.device),
      .page_size = flags.page_size,
      .bf16 = flags.activation == "bf16",
      .layers = {},
  };
  std::size_t begin = 0;  // first of the layers that wait; consecutive layers are loaded together
  const auto run_waiting = [&] {
    if (begin == report.layers.size()) return;
    const int first = report.layers[begin].result.layer, count = static_cast<int>(report.layers.size() - begin);
    for (const kvq_selftest_layer& result : replay(flags, artifact, first, count))
      report.layers[begin++].result = result;
  };
  for (const LayerPlan& plan : artifact.layers) {
    if (begin < report.layers.size() && report.layers.back().result.layer != plan.layer - 1) run_waiting();
    std::string k, v;
    try {
      const PageLayout pages = page_layout_of(plan, flags.page_size);
      k = format_of(plan.k, pages.k), v = format_of(*plan.v, pages.v);
      report.layers.push_back({k, v, not_run(plan.layer, "")});
    } catch (const Error& error) {
      if (error.kind() != ErrorKind::unsupported) throw;
      run_waiting();
      report.layers.push_back({k, v, not_run(plan.layer, error.what())});
      begin = report.layers.size();
    }
  }
  run_waiting();
  return report;
}

int selftest(const SelftestFlags& flags) {
  const SelftestReport report =
      test(flags, open_with_hint({flags.artifact}, hint_for_artifact, [&] { return load_artifact(flags.artifact); }));
  fmt::print("{}", flags.json ? json_of(report).dump(2) + "\n" : text_of(report));
  const kvq_status status = report.status();
  return status == KVQ_OK ? 0 : exit_code(status == KVQ_MISMATCH ? ErrorKind::check_failed : ErrorKind::unsupported);
}

}  // namespace

}  // namespace kvq

int main(int argc, char** argv) {
  CLI::App app;
  kvq::SelftestFlags flags;
  kvq::describe(app, kvq::selftest_text());
  kvq::add_flags(app, flags);
  return kvq::run_tool("kvq-selftest", app, argc, argv, [&] { return kvq::selftest(flags); });
}
