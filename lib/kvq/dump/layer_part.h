#pragma once

#include <kvq/dump/dump_part.h>

#include <cstdint>
#include <string>

namespace kvq {

/// @throws Error  "<place of the object>: <what>"
[[noreturn]] void fail_at(const hdf5::Object& object, const std::string& what, ErrorKind kind = ErrorKind::bad_input);

/// An integer attribute within [low, high]. @throws Error{bad_input}
int read_bounded(const hdf5::Object& object, const char* name, std::int64_t low, std::int64_t high);

/// Checks the structure of one layer of one file. Independent faults go to `faults`.
/// @param tokens  number of tokens that q, k and v must have, or -1 to accept any
LayerPart read_layer_part(const hdf5::Group& layer, std::int64_t tokens, Faults& faults);

}  // namespace kvq
