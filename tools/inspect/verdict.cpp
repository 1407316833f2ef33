#include "inspect/verdict.h"

#include "common/layers.h"
#include "common/plural.h"
#include "common/table.h"
#include "common/text_wrap.h"
#include "inspect/layout.h"
#include "inspect/legend.h"
#include "inspect/serving.h"

#include <fmt/format.h>

#include <algorithm>

namespace kvq {

namespace {

std::optional<SideErrors> errors_of(const Artifact& artifact, Side side) {
  SideErrors sum;
  double layers = 0.0;
  for (const LayerPlan& layer : artifact.layers) {
    const TensorPlan* plan = layer.side(side);
    if (plan == nullptr || !plan->error) continue;
    sum.baseline += plan->error->before;
    sum.plan += plan->error->after;
    layers += 1.0;
  }
  if (layers == 0.0) return std::nullopt;
  return SideErrors{sum.baseline / layers, sum.plan / layers};
}

/// A file name as a POSIX shell takes it.
std::string quoted(const std::string& path) {
  const auto is_plain = [](char c) {
    return std::isalnum(static_cast<unsigned char>(c)) != 0 ||
           std::string_view("_-./+=:,@%").find(c) != std::string::npos;
  };
  if (!path.empty() && std::all_of(path.begin(), path.end(), is_plain)) return path;
  std::string text = "'";
  for (const char c : path) text += c == '\'' ? std::string("'\\''") : std::string(1, c);
  return text + "'";
}

/// "32k" for 32768, else "1000 tokens".
std::string context_text(std::int64_t context) {
  return context % 1024 == 0 ? fmt::format("{}k tokens", context / 1024) : counted(context, "token");
}

std::string size_text(const Verdict& v) {
  return fmt::format("{:.0f} bytes a token and layer in place of {:.0f}; {} ({:.1f}x)", v.token_bytes,
                     v.bf16_token_bytes, cache_text(v), v.times_smaller());
}

Json errors_json(const std::optional<SideErrors>& errors) {
  return errors ? Json{{"baseline", errors->baseline}, {"plan", errors->plan}} : Json();
}

}  // namespace

std::string cache_text(const Verdict& v) {
  return fmt::format("{} in place of {} at {}", format_bytes(v.cache_bytes), format_bytes(v.bf16_bytes),
                     context_text(v.context));
}

std::string error_text(const Verdict& v) {
  if (!v.held_out.is_null())
    return fmt::format("{:.3g} of attention's output on {} held-out tokens, no exact windows; plain codes: {:.3g}",
                       v.held_out.at("output_error").get<double>(), v.held_out.at("tokens").get<std::int64_t>(),
                       v.held_out.at("baseline_error").get<double>());
  std::string text;
  for (const auto& [name, side] : {std::pair{"keys", &v.k}, std::pair{"values", &v.v}})
    if (*side)
      text += fmt::format("{}{} {:.3g} (plain codes {:.3g})", text.empty() ? "" : ", ", name, (*side)->plan,
                          (*side)->baseline);
  return text.empty() ? "none: all rows are exact" : "in sample, which flatters: " + text;
}

Verdict verdict_of(const Artifact& artifact, const std::filesystem::path& output, std::int64_t context) {
  const auto layers = static_cast<double>(artifact.layers.size());
  return {
      .token_bytes = token_bytes(artifact) / layers,
      .bf16_token_bytes = bf16_token_bytes(artifact) / layers,
      .context = context,
      .cache_bytes = cache_bytes(artifact, context),
      .bf16_bytes = bf16_token_bytes(artifact) * static_cast<double>(context),
      .k = errors_of(artifact, Side::k),
      .v = errors_of(artifact, Side::v),
      .held_out = artifact.calibration.held_out,
      .next = fmt::format("kvq-eval --model HELDOUT.h5 --no-windows {}", quoted(output.string())),
  };
}

std::string verdict_text(const Artifact& artifact, const Verdict& verdict) {
  std::string text = wrapped("size     ", size_text(verdict)) + wrapped("error    ", error_text(verdict)) +
                     serving_lines(artifact, "serving  ");
  if (const std::vector<int> missing = missing_layers(artifact); !missing.empty())
    text += wrapped("layers   ", fmt::format("{}: the sizes are of the layers that are there", layers_text(artifact)));
  return text + "next     " + verdict.next + "\n";
}

Json verdict_json(const Verdict& v) {
  Json json = {{"bytes_per_token_and_layer", v.token_bytes},
               {"bf16_bytes_per_token_and_layer", v.bf16_token_bytes},
               {"context", v.context},
               {"cache_bytes", v.cache_bytes},
               {"bf16_bytes", v.bf16_bytes},
               {"times_smaller", v.times_smaller()},
               {"error_of", v.held_out.is_null() ? "in_sample" : "held_out"},
               {"in_sample", {{"k", errors_json(v.k)}, {"v", errors_json(v.v)}}},
               {"next", v.next}};
  if (!v.held_out.is_null()) json["held_out"] = v.held_out;
  return json;
}

}  // namespace kvq
