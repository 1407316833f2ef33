#include "common/cli.h"
#include "common/describe.h"
#include "common/plural.h"
#include "common/text_output.h"
#include "common/wrong_file.h"
#include "inspect/compare.h"
#include "inspect/details.h"
#include "inspect/head.h"
#include "inspect/layout.h"
#include "inspect/legend.h"
#include "inspect/report.h"
#include "inspect/serving.h"
#include "inspect/widths.h"
#include "report/report.h"

#include <kvq/artifact/verify.h>
#include <kvq/compute/parallel.h>
#include <kvq/core/error.h>

#include <unistd.h>

#include <algorithm>
#include <optional>

namespace kvq {

namespace {

struct InspectFlags {
  std::string artifact, reference, html;
  std::vector<std::string> evaluations;
  int layer = -1, head = -1;
  int page_size = 64;
  std::int64_t context = 32768;
  bool json = false, layout = false, verify = false;
};

ToolText inspect_text() {
  return {
      .name = "kvq-inspect",
      .summary = "prints what a calibration artifact says",
      .description =
          "Prints how an artifact stores the keys and values of each layer, and where the artifact came from.",
      .examples = {{"kvq-inspect out.safetensors", "the allocation, one line a layer and side"},
                   {"kvq-inspect out.safetensors --layer 3", "one layer, every head"},
                   {"kvq-inspect out.safetensors --layer 3 --head 0",
                    "one head: what its channels are worth, and their widths"},
                   {"kvq-inspect out.safetensors --layout --page-size 64", "bytes per token and page"},
                   {"kvq-inspect out.safetensors --compare b.safetensors",
                    "distance of the keys' widths from those of b"},
                   {"kvq-inspect out.safetensors --html report.html --eval eval.json",
                    "all of it in one page, with results of kvq-eval --json"},
                   {"kvq-inspect out.safetensors --verify",
                    "hash, schema, rotations, golden rows; exit code 6 if a check fails"}},
      .first_flags = {"--verify", "--layout", "--layer", "--head", "--context", "--page-size", "--compare", "--html",
                      "--eval", "--json"},
      .sections = {{"Letters of a rotation", letters_help()}},
  };
}

void add_flags(CLI::App& app, InspectFlags& f) {
  app.add_option("artifact", f.artifact, "artifact of kvq-calibrate (formats/artifact.md)")
      ->required()
      ->type_name("FILE");
  CLI::Option* layer = app.add_option("--layer", f.layer, "show one layer in detail")->check(whole_number(0, 4095));
  app.add_option("--head", f.head, "with --layer: one KV head's energies and widths, or with --layout its row")
      ->check(whole_number(0, 4095))
      ->needs(layer);
  app.add_flag("--json", f.json, "one JSON document: the manifest, with what was asked for beside it");
  app.add_flag("--layout", f.layout, "bytes per token, per page, alignment; with --layer also the parts of its rows");
  app.add_option("--page-size", f.page_size, "tokens of a page, for --layout")
      ->check(whole_number(1, 1 << 20))
      ->capture_default_str();
  app.add_option("--context", f.context, "context length, for --layout and --html")
      ->check(whole_number(1, std::int64_t{1} << 30))
      ->capture_default_str();
  app.add_flag("--verify", f.verify, "check schema, content hash, all that the file says twice, and golden rows");
  app.add_option("--compare", f.reference,
                 "reference artifact: how many RoPE blocks have other widths, and what that costs")
      ->type_name("FILE");
  CLI::Option* html =
      app.add_option("--html", f.html,
                     "write a report with charts: one HTML file that needs nothing else; - is standard output")
          ->type_name("FILE");
  app.add_option("--eval", f.evaluations,
                 "with --html: what kvq-eval --json said of this model; may be given several times")
      ->type_name("FILE")
      ->allow_extra_args(false)
      ->needs(html);
  for (const char* view : {"--layer", "--json", "--layout", "--verify", "--compare"})
    html->excludes(app.get_option(view));
}

const LayerPlan& find_layer(const Artifact& artifact, int layer) {
  const auto it = std::find_if(artifact.layers.begin(), artifact.layers.end(),
                               [&](const LayerPlan& plan) { return plan.layer == layer; });
  if (it == artifact.layers.end())
    throw Error{ErrorKind::usage, fmt::format("--layer {}: the artifact has {}, {} to {}", layer,
                                              counted(artifact.layers.size(), "layer"), artifact.layers.front().layer,
                                              artifact.layers.back().layer)};
  return *it;
}

/// @param head  -1: no head was asked for
void check_head(const LayerPlan& plan, int head) {
  if (head >= plan.geometry.num_kv_heads)
    throw Error{ErrorKind::usage,
                fmt::format("--head {}: layer {} has {}, 0 to {}", head, plan.layer,
                            counted(plan.geometry.num_kv_heads, "key/value head"), plan.geometry.num_kv_heads - 1)};
}

Json checks_json(const std::vector<Check>& checks) {
  Json json = Json::array();
  for (const Check& check : checks)
    json.push_back({{"name", check.name}, {"passed", check.passed}, {"detail", check.detail}});
  return json;
}

/// The request of the command line, loaded and checked.
struct Request {
  const InspectFlags& flags;
  NamedArtifact own;
  const LayerPlan* layer = nullptr;  ///< --layer
  std::vector<Check> checks = {};    ///< --verify
  std::optional<AllocationComparison> comparison = {};
  bool passed() const {
    return std::all_of(checks.begin(), checks.end(), [](const Check& check) { return check.passed; });
  }
};

Artifact load_with_hint(const std::string& path) {
  return open_with_hint({path}, hint_for_artifact, [&] { return load_artifact(path); });
}

/// Loads the artifact of the command line. --verify reports a wrong content hash among its checks, so the file is read
/// although the hash is wrong.
Request open(const InspectFlags& flags) {
  return open_with_hint({flags.artifact}, hint_for_artifact, [&] {
    const SafetensorsFile file = SafetensorsFile::open(flags.artifact);
    const HashCheck hash = flags.verify ? HashCheck::left_out : HashCheck::demanded;
    Request request{.flags = flags, .own = {flags.artifact, load_artifact(file, hash)}};
    if (flags.verify) request.checks = verify_artifact(file, request.own.artifact, parallel_for);
    return request;
  });
}

Request load(const InspectFlags& flags) {
  if (!flags.reference.empty() && (flags.layer >= 0 || flags.layout || flags.verify))
    throw Error{ErrorKind::usage, "--compare does not go with --layer, --layout or --verify"};
  Request request = open(flags);
  if (flags.layer >= 0) request.layer = &find_layer(request.own.artifact, flags.layer);
  if (request.layer) check_head(*request.layer, flags.head);
  if (!flags.reference.empty())
    request.comparison = compare_allocations(request.own, {flags.reference, load_with_hint(flags.reference)});
  return request;
}

Json to_json(const Request& request) {
  const InspectFlags& flags = request.flags;
  const Artifact& artifact = request.own.artifact;
  Json json = {{"schema_version", "1.2"},           {"tool", "kvq-inspect " KVQ_VERSION},
               {"artifact", flags.artifact},        {"manifest", artifact_manifest(artifact)},
               {"serving", serving_json(artifact)}, {"missing_layers", missing_layers(artifact)}};
  if (Json details = details_json(artifact, json["manifest"], flags.layer); !details.is_null())
    json["layers"] = std::move(details);
  if (Json widths = model_widths_json(artifact); !widths.is_null()) json["widths"] = std::move(widths);
  if (request.layer)
    json["layer"] = json["manifest"]["layers"][static_cast<std::size_t>(request.layer - artifact.layers.data())];
  if (flags.head >= 0) json["head"] = head_json(*request.layer, flags.head);
  if (flags.layout) json["layout"] = layout_json(artifact, flags.page_size, flags.context);
  if (flags.layout && request.layer) json["layout"]["row"] = segments_json(*request.layer, std::max(flags.head, 0));
  if (flags.verify) json["verify"] = checks_json(request.checks);
  if (request.comparison) {
    json["compare"] = comparison_json(*request.comparison);
    json["compare"]["reference"] = flags.reference;
  }
  return json;
}

std::string checks_text(const std::vector<Check>& checks) {
  std::string text;
  for (const Check& check : checks)
    text += fmt::format("{}  {}: {}\n", check.passed ? "ok    " : "FAILED", check.name, check.detail);
  return text;
}

std::string layout_text(const Request& request) {
  const InspectFlags& flags = request.flags;
  const std::string text = describe_layout(request.own.artifact, flags.page_size, flags.context);
  return request.layer ? text + "\n" + describe_segments(*request.layer, std::max(flags.head, 0)) : text;
}

/// The text of one view. If flags ask for several views, the first in this order is shown.
std::string to_text(const Request& request) {
  const Artifact& artifact = request.own.artifact;
  const bool color = wants_color(STDOUT_FILENO);
  if (request.flags.verify) return checks_text(request.checks);
  if (request.flags.layout) return layout_text(request);
  if (request.comparison) return describe_comparison(*request.comparison);
  if (request.flags.head >= 0) return describe_head(artifact, *request.layer, request.flags.head, color);
  if (request.layer) return describe_layer(artifact, *request.layer, color);
  return describe(artifact, color);
}

int inspect(const InspectFlags& flags) {
  if (!flags.html.empty()) {
    const auto claim = claim_text_output(flags.html, "kvq-inspect");
    write_html_report({flags.artifact, load_with_hint(flags.artifact)}, flags.evaluations, flags.context, flags.html);
    return 0;
  }
  const Request request = load(flags);
  fmt::print("{}", flags.json ? to_json(request).dump(2) + "\n" : to_text(request));
  return request.passed() ? 0 : exit_code(ErrorKind::check_failed);
}

}  // namespace

}  // namespace kvq

int main(int argc, char** argv) {
  CLI::App app;
  kvq::InspectFlags flags;
  kvq::describe(app, kvq::inspect_text());
  kvq::add_flags(app, flags);
  return kvq::run_tool("kvq-inspect", app, argc, argv, [&] { return kvq::inspect(flags); });
}
