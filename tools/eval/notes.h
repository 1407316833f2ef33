#pragma once

#include <kvq/dump/dump_file.h>
#include <kvq/eval/evaluate.h>

#include <string>
#include <vector>

/// What a reader of the numbers must know about dump and artifacts.
namespace kvq {

struct EvalNote {
  std::string kind;  ///< "calibration_dump", "dump_layers", "artifact_layers" or "rotary_keys"
  std::string text;
};

/// A dump that lacks layers of its model, artifacts that cover some of the model's layers or were calibrated on this
/// dump, and layers of rotary keys alone.
std::vector<EvalNote> notes_of(const ModelGeometry& model, const EvalRequest& request,
                               const std::vector<Candidate>& candidates, const std::vector<CandidateResult>& results);

/// "kvq-eval: warning: ..." or "kvq-eval: note: ...", a line each.
std::string notes_text(const std::vector<EvalNote>& notes);

/// For --json: a list of {"kind", "text"}.
Json notes_json(const std::vector<EvalNote>& notes);

}  // namespace kvq
