#include "eval/notes.h"

#include "common/layers.h"
#include "common/plural.h"
#include "inspect/legend.h"

#include <kvq/core/text.h>

#include <fmt/format.h>

#include <algorithm>

namespace kvq {

namespace {

constexpr const char* kCalibrationDump = "calibration_dump";

void note_calibration(const Candidate& candidate, const CandidateResult& result, std::vector<EvalNote>& notes) {
  const std::string name = printable(candidate.name, 200);
  if (result.calibrated_on == DumpRelation::same)
    notes.push_back(
        {kCalibrationDump,
         fmt::format("{} was calibrated on this dump: its errors are in sample; measure on other text", name)});
  if (result.calibrated_on == DumpRelation::unknown)
    notes.push_back({kCalibrationDump,
                     fmt::format("whether {} was calibrated on this dump is unknown, because some of its layers were "
                                 "not measured",
                                 name)});
}

/// Layers without values: only the rotary part of the keys is in the dump.
std::vector<int> rotary_layers(const ModelGeometry& model, const std::vector<int>& measured) {
  std::vector<int> layers;
  for (const LayerEntry& entry : model.layers)
    if (!entry.has_values && std::find(measured.begin(), measured.end(), entry.layer) != measured.end())
      layers.push_back(entry.layer);
  return layers;
}

}  // namespace

std::vector<EvalNote> notes_of(const ModelGeometry& model, const EvalRequest& request,
                               const std::vector<Candidate>& candidates, const std::vector<CandidateResult>& results) {
  std::vector<EvalNote> notes;
  for (std::size_t c = 0; c < candidates.size(); ++c) note_calibration(candidates[c], results[c], notes);
  std::vector<int> present;
  for (const LayerEntry& entry : model.layers) present.push_back(entry.layer);
  if (const std::vector<int> missing = layers_without(present, model.num_layers); !missing.empty())
    notes.push_back(
        {"dump_layers", fmt::format("the dump has {} of the model's {}, without {}: means are over the "
                                    "layers that are there",
                                    counted(present.size(), "layer"), model.num_layers, range_text(missing))});
  for (const Candidate& candidate : candidates)
    if (candidate.artifact && !missing_layers(*candidate.artifact).empty())
      notes.push_back({"artifact_layers", fmt::format("{} has {} of the model", printable(candidate.name, 200),
                                                      layers_text(*candidate.artifact))});
  if (const std::vector<int> rotary = rotary_layers(model, request.layers); !rotary.empty())
    notes.push_back(
        {"rotary_keys",
         fmt::format("layers {}: the dump has rotary keys alone (MLA). KL, top-10 and logit errors are of partial "
                     "scores, those of the rotary part; the latent part is not there, so they say nothing of the "
                     "model's own attention weights",
                     range_text(rotary))});
  return notes;
}

std::string notes_text(const std::vector<EvalNote>& notes) {
  std::string text;
  for (const EvalNote& note : notes)
    text += fmt::format("kvq-eval: {}: {}\n", note.kind == kCalibrationDump ? "warning" : "note", note.text);
  return text;
}

Json notes_json(const std::vector<EvalNote>& notes) {
  Json json = Json::array();
  for (const EvalNote& note : notes) json.push_back({{"kind", note.kind}, {"text", note.text}});
  return json;
}

}  // namespace kvq
