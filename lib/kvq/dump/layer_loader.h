#pragma once

#include <kvq/dump/dump_file.h>
#include <kvq/dump/dump_part.h>

#include <span>

namespace kvq {

/// Reads one layer of the files that hold it and joins them in order. See Dump::load_layer().
LayerActivations read_layer(int layer, std::span<const DumpPart* const> parts, const Sequences& joined);

}  // namespace kvq
