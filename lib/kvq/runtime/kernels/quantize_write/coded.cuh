#pragma once

#include <kvq/runtime/kernels/quantize_write/pairs.h>
#include <kvq/runtime/kernels/quantize_write/launch.cuh>

#include <algorithm>
#include <type_traits>

/// Writes sides of one group of codebook codes or trellis codes, and keys of mixed widths, by the kernels of the other
/// formats, which take any side: one launch for both sides if they have the same CodedRows and are rotated alike, else
/// one for each.
namespace kvq::write {

/// Calls f() with a side of CodedRows.
template <typename F>
auto with_coded_side(CodedRows rows, F f) {
  if (rows.pair_memory > 0) return f(TrellisSide<kPairHeadDim>{});
  if (rows.codebook_bits == kMixedBits) return f(SegmentSide<kTableHeadDim, 2>{});
  if (rows.codebook_bits == 2) return f(CodebookSide<kTableHeadDim, 2>{});
  if (rows.codebook_bits == 3) return f(CodebookSide<kTableHeadDim, 3>{});
  return f(CodebookSide<kTableHeadDim, 4>{});
}

/// Keys of mixed widths, for calls with many tokens and a rotation by blocks.
using ManySegmentRows = SegmentSide<kTableHeadDim, 8>;

template <typename T>
Status plan_coded_write(WriteLaunch& launch) {
  const CacheFormat& format = launch.format;
  const bool bf16 = std::is_same_v<T, __nv_bfloat16>;
  Status status = generic_write(format, bf16).plan_kernel(launch);
  for (const CodedRows& rows : {launch.k_rows, launch.v_rows}) {
    if (status.ok() && rows.any())
      status = with_coded_side(rows, [&]<typename Side>(Side) { return plan_write<Side, Side, T>(launch); });
    if (status.ok() && rows.codebook_bits == kMixedBits)
      status = plan_block_write<ManySegmentRows, ManySegmentRows, T>(launch);
    if (status.ok() && rows.pair_memory > 0) status = plan_pairs(rows.pair_memory);
  }
  return status;
}

/// How many tokens of a call a side's kernels take at once: as many in each round; 0: the generic kernel takes them.
/// @param jobs  that share the launch
inline int tokens_of_round(const WriteLaunch& launch, const WriteParams& p, CodedRows rows, int jobs) {
  if (rows.codebook_bits > 0) return p.num_tokens;
  if (rows.pair_memory == 0 || std::int64_t{p.num_tokens} * jobs < launch.least_pair_rows || !p.workspace) return 0;
  const std::int64_t blocks = (p.num_tokens - 1) / PairBlock::kTokens + 1;
  const std::size_t block_bytes = static_cast<std::size_t>(jobs) * PairBlock{rows.pair_memory}.bytes();
  const std::int64_t room = std::min(static_cast<std::int64_t>(p.workspace_bytes / block_bytes), blocks);
  if (room < blocks && room * PairBlock::kTokens * jobs < launch.least_pair_rows) return 0;
  const std::int64_t rounds = (blocks - 1) / room + 1;
  return static_cast<int>((blocks - 1) / rounds + 1) * PairBlock::kTokens;
}

/// The tokens of a call from `first` on.
template <typename T>
WriteParams tokens_of(const WriteParams& p, int first, int count) {
  WriteParams part = p;
  part.num_tokens = std::min(count, p.num_tokens - first);
  for (WriteSide* side : {&part.k, &part.v}) side->x = static_cast<const T*>(side->x) + first * side->token_stride;
  part.slot_mapping += first;
  if (part.window_mapping) part.window_mapping += first;
  return part;
}

/// Launches the kernel for the rotation of the jobs. Keys of mixed widths are quantized eight rows at a time if each
/// warp has 16 tokens anyway, that is if row_parts() has no warps to spare.
template <typename Side, typename T>
cudaError_t launch_coded_rows(const WriteLaunch& launch, const WriteParams& params, int first_job, int jobs,
                              CUstream_st* stream) {
  if (kind_of(first_job > 0 ? params.v : params.k) == WriteKind::dense)
    return launch_dense_write<Side, Side, T>(launch, params, first_job, jobs, stream);
  if constexpr (HasSegments<Side>) {
    const std::int64_t runs = (params.num_tokens - 1) / kTileTokens + 1;
    if (row_parts<Side>(runs * jobs, resident_warps<Side>(launch)) == 1)
      return launch_write<ManySegmentRows, ManySegmentRows, T>(launch, params, first_job, jobs, stream);
  }
  return launch_write<Side, Side, T>(launch, params, first_job, jobs, stream);
}

/// Writes the jobs from `first_job` on, which have the same CodedRows and WriteKind.
/// @param tokens  tokens_of_round()
template <typename T>
Status run_coded_jobs(const WriteLaunch& launch, const WriteParams& params, CodedRows rows, int tokens, int first_job,
                      int jobs, CUstream_st* stream) {
  if (tokens == 0) return run_generic_write(launch, params, first_job, jobs, std::is_same_v<T, __nv_bfloat16>, stream);
  Status status;
  for (int first = 0; status.ok() && first < params.num_tokens; first += tokens) {
    WriteParams part = tokens_of<T>(params, first, tokens);
    part.pairs = {params.workspace, (part.num_tokens - 1) / PairBlock::kTokens + 1, first_job, rows.pair_memory};
    status = with_coded_side(rows, [&]<typename Side>(Side) {
      return cuda_status(launch_coded_rows<Side, T>(launch, part, first_job, jobs, stream),
                         "quantize_write: coded rows: launch");
    });
    if (status.ok() && rows.pair_memory > 0) status = run_pairs(part, jobs, stream);
  }
  return status;
}

template <typename T>
Status run_coded_write(const WriteLaunch& launch, const WriteParams& given, CUstream_st* stream) {
  if (given.num_tokens == 0) return {};
  WriteParams params = given;
  params.k_tile_bytes = launch.format.k.bytes(), params.v_tile_bytes = launch.format.v.bytes();
  params.k_segments = launch.format.k;
  const CodedRows &k = launch.k_rows, &v = launch.v_rows;
  const int heads = params.num_kv_heads;
  const bool together = k == v && kind_of(params.k) == kind_of(params.v);
  const int jobs = together ? 2 * heads : heads;
  const int k_tokens = tokens_of_round(launch, params, k, jobs), v_tokens = tokens_of_round(launch, params, v, jobs);
  if (together || (k_tokens == 0 && v_tokens == 0))
    return run_coded_jobs<T>(launch, params, k, k_tokens, 0, 2 * heads, stream);
  const Status status = run_coded_jobs<T>(launch, params, k, k_tokens, 0, heads, stream);
  return status.ok() ? run_coded_jobs<T>(launch, params, v, v_tokens, heads, heads, stream) : status;
}

template <typename T>
WriteVariant coded_write_variant(const char* name, const CacheFormat& format, CodedRows k, CodedRows v) {
  WriteVariant variant{name,
                       format.k,
                       format.v,
                       format.k_bfloat,
                       format.v_bfloat,
                       std::is_same_v<T, __nv_bfloat16>,
                       plan_coded_write<T>,
                       run_coded_write<T>,
                       k.codebook_bits > 0 && v.codebook_bits > 0};
  variant.k_rows = k, variant.v_rows = v;
  return variant;
}

WriteVariant coded_write_bf16(const CacheFormat& format, CodedRows k, CodedRows v);
WriteVariant coded_write_fp16(const CacheFormat& format, CodedRows k, CodedRows v);

}  // namespace kvq::write
