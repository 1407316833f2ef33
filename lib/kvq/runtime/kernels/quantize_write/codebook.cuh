#pragma once

#include <kvq/runtime/kernels/quantize_write/launch.cuh>

#include <type_traits>

/// Writes sides of one group of codebook codes, and keys of mixed widths, by the kernels of the other formats, which
/// take any side: one launch for both sides if they have codes of one width and are rotated alike, else one for each.
namespace kvq::write {

/// Calls f() with a CodebookSide or SegmentSide. @param bits  codebook_row_bits()
template <typename F>
auto with_codebook_side(int bits, F f) {
  if (bits == kMixedBits) return f(SegmentSide<kTableHeadDim>{});
  if (bits == 2) return f(CodebookSide<kTableHeadDim, 2>{});
  if (bits == 3) return f(CodebookSide<kTableHeadDim, 3>{});
  return f(CodebookSide<kTableHeadDim, 4>{});
}

template <typename T>
Status plan_codebook_write(WriteLaunch& launch) {
  const CacheFormat& format = launch.format;
  const bool bf16 = std::is_same_v<T, __nv_bfloat16>;
  Status status = generic_write(format, bf16).plan_kernel(launch);
  for (const int bits : {launch.k_codebook_bits, launch.v_codebook_bits})
    if (status.ok() && bits > 0)
      status = with_codebook_side(bits, [&]<typename Side>(Side) { return plan_write<Side, Side, T>(launch); });
  return status;
}

template <typename T>
Status run_codebook_write(const WriteLaunch& launch, const WriteParams& given, CUstream_st* stream) {
  if (given.num_tokens == 0) return {};
  WriteParams params = given;
  params.k_tile_bytes = launch.format.k.bytes(), params.v_tile_bytes = launch.format.v.bytes();
  params.k_segments = launch.format.k;
  const int heads = params.num_kv_heads;
  const auto run = [&](int bits, bool value, int jobs) {
    if (bits == 0) return run_generic_write(launch, params, value, std::is_same_v<T, __nv_bfloat16>, stream);
    return with_codebook_side(bits, [&]<typename Side>(Side) {
      const int first_job = value ? heads : 0;
      const cudaError_t error = kind_of(value ? params.v : params.k) == WriteKind::dense
                                    ? launch_dense_write<Side, Side, T>(launch, params, first_job, jobs, stream)
                                    : launch_write<Side, Side, T>(launch, params, first_job, jobs, stream);
      return cuda_status(error, "quantize_write: codebook codes: launch");
    });
  };
  const int k_bits = launch.k_codebook_bits, v_bits = launch.v_codebook_bits;
  if (k_bits == v_bits && kind_of(params.k) == kind_of(params.v)) return run(k_bits, false, 2 * heads);
  const Status status = run(k_bits, false, heads);
  return status.ok() ? run(v_bits, true, heads) : status;
}

template <typename T>
WriteVariant codebook_write_variant(const char* name, const CacheFormat& format, int k_bits, int v_bits) {
  WriteVariant variant{name,
                       format.k,
                       format.v,
                       format.k_bfloat,
                       format.v_bfloat,
                       std::is_same_v<T, __nv_bfloat16>,
                       plan_codebook_write<T>,
                       run_codebook_write<T>,
                       k_bits > 0 && v_bits > 0};
  variant.k_codebook_bits = k_bits, variant.v_codebook_bits = v_bits;
  return variant;
}

WriteVariant codebook_write_bf16(const CacheFormat& format, int k_bits, int v_bits);
WriteVariant codebook_write_fp16(const CacheFormat& format, int k_bits, int v_bits);

}  // namespace kvq::write
