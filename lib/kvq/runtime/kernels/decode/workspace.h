#pragma once

#include <cstddef>

namespace kvq {

/// Where the parts of a decode call's workspace lie: offsets in bytes. The address of the workspace is a multiple of
/// 256.
struct DecodeWorkspace {
  std::size_t work_counter = 0;  ///< one 32-bit integer
  std::size_t completions = 0;   ///< one 64-bit word for each work tile
  std::size_t partials = 0;      ///< partial results: cut entries (schedule.h), then one entry for each work tile
  std::size_t operands = 0;      ///< queries of each work tile
  std::size_t total = 0;
};

/// @param cut_partials  partial results in addition to one for each work tile
DecodeWorkspace make_decode_workspace(std::size_t work_tiles, std::size_t cut_partials, std::size_t partial_bytes,
                                      std::size_t operand_bytes);

}  // namespace kvq
