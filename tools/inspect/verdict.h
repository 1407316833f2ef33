#pragma once

#include <kvq/artifact/artifact.h>

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>

namespace kvq {

/// Mean in-sample errors of one side over the layers that have one.
struct SideErrors {
  double baseline = 0.0, plan = 0.0;
};

/// What a calibration came to, in the numbers that a reader asks for first.
struct Verdict {
  double token_bytes = 0.0, bf16_token_bytes = 0.0;  ///< a token and layer, all KV heads, mean over layers
  std::int64_t context = 0;                          ///< tokens
  double cache_bytes = 0.0, bf16_bytes = 0.0;        ///< a sequence of `context` tokens, all layers, windows included
  std::optional<SideErrors> k = {}, v = {};          ///< in sample; missing for exact sides
  Json held_out = {};                                ///< `calibration.held_out` of the manifest, or null
  std::string next = {};                             ///< the command to type next
  double times_smaller() const { return bf16_bytes / cache_bytes; }
};
Verdict verdict_of(const Artifact& artifact, const std::filesystem::path& output, std::int64_t context);

/// "33 MB in place of 201 MB at 32k tokens"
std::string cache_text(const Verdict& verdict);
/// The error of attention's output on held-out tokens of the calibration's dump, or the errors in sample, each beside
/// plain codes of the same bytes.
std::string error_text(const Verdict& verdict);

/// Paragraphs: size, error, how the runtime serves the artifact, layers that are missing, and the next command.
std::string verdict_text(const Artifact& artifact, const Verdict& verdict);

/// For --json. Errors are {"baseline", "plan"}; `error_of` is "held_out" or "in_sample".
Json verdict_json(const Verdict& verdict);

}  // namespace kvq
