#pragma once

#include <kvq/artifact/artifact.h>

#include <map>
#include <optional>
#include <string>

namespace kvq {

/// What is known of an artifact's calibration dump and the dump that it is measured on.
enum class DumpRelation {
  same,     ///< the artifact was calibrated on tokens of this dump: its errors here are in sample
  another,  ///< the dumps' data differ as a whole. Parts of them may still be equal: the hashes do not say
  unknown,  ///< layers of the artifact were not measured, so that the hash of all of them is not known
};
const char* to_string(DumpRelation relation);

/// @param layer_hashes  content hashes of the measured layers of the dump (LayerActivations::content_hash)
DumpRelation relation_to(const Artifact& artifact, const std::map<int, std::string>& layer_hashes);

}  // namespace kvq
