#include <kvq/core/error.h>
#include <kvq/dump/hdf5.h>
#include <kvq/dump/hdf5_detail.h>

namespace kvq::hdf5 {

bool is_integer_le(hid_t type) {
  const hid_t known[] = {H5T_STD_I8LE, H5T_STD_I16LE, H5T_STD_I32LE, H5T_STD_I64LE,
                         H5T_STD_U8LE, H5T_STD_U16LE, H5T_STD_U32LE, H5T_STD_U64LE};
  for (const hid_t candidate : known)
    if (H5Tequal(type, candidate) > 0) return true;
  return false;
}

bool is_float_le(hid_t type) { return H5Tequal(type, H5T_IEEE_F32LE) > 0 || H5Tequal(type, H5T_IEEE_F64LE) > 0; }

/// HDF5 1.10 has no name for binary16: a writer describes it by its fields, as h5py does for numpy.float16.
bool is_half_le(hid_t type) {
  if (H5Tget_class(type) != H5T_FLOAT || H5Tget_size(type) != 2 || H5Tget_order(type) != H5T_ORDER_LE) return false;
  std::size_t sign = 0, exponent = 0, exponent_bits = 0, mantissa = 0, mantissa_bits = 0;
  if (H5Tget_fields(type, &sign, &exponent, &exponent_bits, &mantissa, &mantissa_bits) < 0) return false;
  return sign == 15 && exponent == 10 && exponent_bits == 5 && mantissa == 0 && mantissa_bits == 10 &&
         H5Tget_ebias(type) == 15 && H5Tget_norm(type) == H5T_NORM_IMPLIED && H5Tget_precision(type) == 16 &&
         H5Tget_offset(type) == 0;
}

Element element_of(hid_t type) {
  if (H5Tequal(type, H5T_STD_U8LE) > 0) return Element::u8;
  if (H5Tequal(type, H5T_STD_U16LE) > 0) return Element::u16;
  if (H5Tequal(type, H5T_STD_I64LE) > 0) return Element::i64;
  if (H5Tequal(type, H5T_IEEE_F32LE) > 0) return Element::f32;
  if (H5Tequal(type, H5T_IEEE_F64LE) > 0) return Element::f64;
  if (is_half_le(type)) return Element::f16;
  return Element::other;
}

std::string describe_type(hid_t type) {
  const auto bits = 8 * H5Tget_size(type);
  const char* order = H5Tget_order(type) == H5T_ORDER_BE && bits > 8 ? "big-endian " : "";
  switch (H5Tget_class(type)) {
    case H5T_INTEGER: return fmt::format("{}{}{}", order, H5Tget_sign(type) == H5T_SGN_NONE ? "uint" : "int", bits);
    case H5T_FLOAT:
      if (*order == '\0' && !is_float_le(type) && !is_half_le(type))
        return fmt::format("a float of {} bits that is not IEEE", bits);
      return fmt::format("{}float{}", order, bits);
    case H5T_STRING: return "string";
    case H5T_BITFIELD: return "bit field";
    case H5T_OPAQUE: return "opaque";
    case H5T_COMPOUND: return "compound";
    case H5T_REFERENCE: return "reference";
    case H5T_ENUM: return "enum";
    case H5T_VLEN: return "variable-length sequence";
    case H5T_ARRAY: return "array";
    default: return "unknown type";
  }
}

}  // namespace kvq::hdf5
