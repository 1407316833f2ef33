#pragma once

#include <kvq/dump/dump_file.h>
#include <kvq/dump/dump_part.h>

#include <span>

namespace kvq {

/// Reads one layer from `parts`, the files that hold it, and joins their tokens in this order. See Dump::load_layer()
/// and, for `joined`, Sequences::append().
LayerActivations read_layer(int layer, std::span<const DumpPart* const> parts, const Sequences& joined);

/// Finds what read_layer() would refuse, in little memory. @throws as Dump::load_layer()
void check_layer(int layer, std::span<const DumpPart* const> parts);

}  // namespace kvq
