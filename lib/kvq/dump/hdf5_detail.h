#pragma once

#include <kvq/core/error.h>
#include <kvq/dump/hdf5.h>

#include <string>

/// Shared by the hdf5*.cpp files; private to them.
namespace kvq::hdf5 {

/// Throws Error{kind, "<place>: <what>"}.
[[noreturn]] void reject(const std::string& place, const std::string& what, ErrorKind kind = ErrorKind::bad_input,
                         std::string hint = {});

/// HDF5's description of its last failure: the deepest entry of the error stack, which is the most specific.
std::string library_reason();

// These functions compare types bit for bit, so that HDF5 never converts from a layout that a hostile file made up.
bool is_integer_le(hid_t type);  ///< 8 to 64 bits, signed or not
bool is_float_le(hid_t type);    ///< IEEE binary32 or binary64
bool is_half_le(hid_t type);     ///< IEEE binary16
Element element_of(hid_t type);

}  // namespace kvq::hdf5
