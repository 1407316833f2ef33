#include "inspect/serving.h"

#include "common/layers.h"
#include "report/page.h"
#include "report/sections.h"
#include "report/text.h"

#include <fmt/format.h>

namespace kvq {

namespace {

/// Formats that pages hold, and the kernel of each verb: a line for each group of layers.
HtmlRows serving_rows(const std::vector<ServingGroup>& groups) {
  HtmlRows rows{{"layers", "format"}};
  for (const KernelVerb verb : kKernelVerbs) rows[0].emplace_back(to_string(verb));
  for (const ServingGroup& group : groups) {
    rows.push_back({range_text(group.layers), group.format.empty() ? "–" : group.format});
    for (const KernelVerb verb : kKernelVerbs) rows.back().emplace_back(to_string(group.served.by(verb)));
  }
  return rows;
}

}  // namespace

std::string serving_section(const Artifact& artifact) {
  const std::vector<ServingGroup> groups = serving_groups(artifact);
  std::string body = html_table(serving_rows(groups), "ltttttt");
  for (const ServingGroup& group : groups)
    if (!group.served.is_served())
      body += html_missing(fmt::format("Layers {}: {}.", range_text(group.layers), serving_text(group)));
  return html_section("serving", "Serving",
                      "Kernels of libkvq_runtime for these layers, bfloat16 activations. Tuned: made for one format. "
                      "Generic: for all other formats that are served, slower.",
                      body);
}

}  // namespace kvq
