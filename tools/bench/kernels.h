#pragma once

#include <kvq/core/status.h>
#include <kvq/plan/page_layout.h>

#include <cstddef>
#include <cstdint>

struct CUstream_st;

/// Kernels of the benchmark alone: fill buffers, and the baselines (read, copy, unfused rotation).
namespace kvq::bench {

/// Fills pages with random codes, scales that make groups 0.6 to 2.4 wide, and minima that center the groups; exact
/// rows are about normal. Rows of bits get scales as of two bits.
Status fill_pages(CUstream_st* stream, std::byte* pages, std::int64_t num_pages, const PageLayout& layout,
                  bool k_bfloat, bool v_bfloat, unsigned seed);
/// Fills rows with about normal numbers of variance 1, in bfloat16 or fp16.
Status fill_rows(CUstream_st* stream, void* rows, std::int64_t count, bool bf16, unsigned seed);

/// Reads every byte of two buffers and does nothing else. Both sizes are multiples of 16.
/// @param sink  a word that the kernel writes so rarely that the store costs nothing
Status read_bytes(CUstream_st* stream, int multiprocessors, const std::byte* first, std::int64_t first_bytes,
                  const std::byte* second, std::int64_t second_bytes, unsigned* sink);

/// Copies with 16 bytes per load and four loads in flight per thread. `bytes` is a multiple of 16.
Status copy_bytes(CUstream_st* stream, int multiprocessors, std::byte* to, const std::byte* from, std::int64_t bytes);

/// Rotates rows of K and V by Hadamard blocks of `order` channels, 16-bit numbers in and out: the first kernel of an
/// unfused write.
/// @param count  elements of each side, a multiple of `order`, which is 8 or more
Status rotate_rows(CUstream_st* stream, const void* k, const void* v, void* k_rotated, void* v_rotated,
                   std::int64_t k_count, std::int64_t v_count, int order, bool bf16);

}  // namespace kvq::bench
