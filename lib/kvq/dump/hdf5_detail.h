#pragma once

#include <kvq/core/error.h>
#include <kvq/dump/hdf5.h>

#include <string>

/// Shared by the hdf5*.cpp files; not for others.
namespace kvq::hdf5 {

/// Throws Error{kind, "<place>: <what>"}.
[[noreturn]] void reject(const std::string& place, const std::string& what, ErrorKind kind = ErrorKind::bad_input,
                         std::string hint = {});

/// HDF5's own words for the failure that just happened: the deepest entry of its error stack, which knows most.
std::string library_reason();

// Types are recognised by what they are, bit for bit, so that the library never has to convert from a layout that a
// hostile file made up.
bool is_integer_le(hid_t type);  ///< 8 to 64 bits, signed or not
bool is_float_le(hid_t type);    ///< IEEE binary32 or binary64
bool is_half_le(hid_t type);     ///< IEEE binary16
Element element_of(hid_t type);

}  // namespace kvq::hdf5
