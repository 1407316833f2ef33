#pragma once

#include <kvq/core/status.h>
#include <kvq/plan/page_layout.h>

#include <cstddef>
#include <cstdint>

struct CUstream_st;

/// Kernels that only the benchmark needs: contents, and what others are compared with.
namespace kvq::bench {

/// Pages of random codes with scales of about half a unit, and minima that centre them; exact rows are normal.
Status fill_pages(CUstream_st* stream, std::byte* pages, std::int64_t num_pages, const PageLayout& layout,
                  bool k_bfloat, bool v_bfloat, unsigned seed);
/// About normal, variance 1, in bfloat16 or fp16.
Status fill_rows(CUstream_st* stream, void* rows, std::int64_t count, bool bf16, unsigned seed);

/// Reads every byte of two runs and does nothing else. Both multiples of 16.
/// @param sink  a word that is hardly ever written
Status read_bytes(CUstream_st* stream, int multiprocessors, const std::byte* first, std::int64_t first_bytes,
                  const std::byte* second, std::int64_t second_bytes, unsigned* sink);

/// Copies as fast as a kernel can: 16 bytes a thread, four in flight. A multiple of 16.
Status copy_bytes(CUstream_st* stream, int multiprocessors, std::byte* to, const std::byte* from, std::int64_t bytes);

/// Hadamard blocks of `order` channels of K's and of V's rows, 16 bit in and out: rotation as a kernel of its own.
/// @param count  elements of each side, a multiple of `order`, which is 8 or more
Status rotate_rows(CUstream_st* stream, const void* k, const void* v, void* k_rotated, void* v_rotated,
                   std::int64_t k_count, std::int64_t v_count, int order, bool bf16);

}  // namespace kvq::bench
