#pragma once

#include <kvq/runtime/kernels/dequantize/coded_layout.h>
#include <kvq/runtime/kernels/common/group_params.cuh>
#include <kvq/runtime/kernels/common/unit_values.cuh>
#include <kvq/runtime/kernels/dequantize/linear_rows.cuh>

/// Dequantizes rows in bit tiles of codebook or symmetric codes, of any widths and up to kMostRowNumbers scales:
/// x = y A^-1 + center with the decoded row y. A warp decodes the 16 rows of a tile to fp16 in shared memory; once
/// decoded, they are multiplied as exact rows are (linear_rows.cuh). A power of two is divided out of each row.
///
///   decoding       lane l         channels l + 32 i of all 16 tokens
///   the product    lane 4 g + t   tokens g and g + 8, channels 32 j + 8 t + e, e = 0..7
namespace kvq::dequantize {

template <int kDim, typename ActivationArg>
struct CodedRowsTraits {
  using Activation = ActivationArg;
  static constexpr int kHeadDim = kDim, kColumns = kDim, kColumnBlocks = 1;
  static constexpr int kWarps = 8, kThreads = 32 * kWarps, kMinBlocks = 2, kTokens = kTileTokens;
  KVQ_HD static constexpr CodedRowsLayout layout() { return {kDim, kWarps}; }
};

/// Where a channel's code is and what it stands for.
struct ChannelCode {
  std::uint16_t first_bit;  ///< of its unit of up to 32 channels in the row
  std::uint8_t in_unit, unit_channels;
  std::uint16_t first_unit;  ///< unit value of code 0 in the block's memory
  std::uint8_t bits, number;
  std::uint32_t unused[2];
};
static_assert(sizeof(ChannelCode) == 16);

/// One block's side and head.
template <typename T>
struct CodedBlock {
  static constexpr CodedRowsLayout kLayout = T::layout();
  unsigned char* shared;
  __device__ __forceinline__ const uint4* matrix(int half) const {
    return reinterpret_cast<const uint4*>(shared + half * kLayout.matrix().block_bytes());
  }
  __device__ __forceinline__ const float* factors(int half) const {
    return reinterpret_cast<const float*>(shared + half * kLayout.matrix().block_bytes() +
                                          kLayout.matrix().factor_offset(1, 0));
  }
  __device__ __forceinline__ float* center() const { return reinterpret_cast<float*>(shared + kLayout.center_at()); }
  __device__ __forceinline__ ChannelCode* channels() const {
    return reinterpret_cast<ChannelCode*>(shared + kLayout.channels_at());
  }
  __device__ __forceinline__ float* units() const { return reinterpret_cast<float*>(shared + kLayout.units_at()); }
  /// [kMostRowNumbers] largest magnitude that a number is multiplied by
  __device__ __forceinline__ float* most() const { return reinterpret_cast<float*>(shared + kLayout.most_at()); }

  // Of this warp.
  __device__ __forceinline__ unsigned char* warp_memory() const {
    return shared + kLayout.warps_at() + static_cast<int>(threadIdx.x) / 32 * kLayout.warp_bytes();
  }
  __device__ __forceinline__ unsigned* words() const { return reinterpret_cast<unsigned*>(warp_memory()); }
  /// [number, token] scales, with the power of two left out; 0 of rows that are not coded
  __device__ __forceinline__ float* scales() const {
    return reinterpret_cast<float*>(warp_memory() + kLayout.scales_at());
  }
  /// [token] those powers
  __device__ __forceinline__ float* powers() const {
    return reinterpret_cast<float*>(warp_memory() + kLayout.powers_at());
  }
  __device__ __forceinline__ unsigned char* row(int token) const {
    return warp_memory() + kLayout.rows_at() + token * kLayout.row_bytes();
  }
};

/// Makes channels, unit values and most(). All threads of a block call it; there is a barrier at its end.
template <typename T>
__device__ __forceinline__ void prepare_codes(const CodedBlock<T>& block, const RowCode& code, int head) {
  const HeadRows& rows = code.heads[head];
  const int thread = static_cast<int>(threadIdx.x), num_segments = rows.num_segments;
  constexpr int kZero = CodedRowsLayout::kMostUnitValues - 1;
  for (int c = thread; c < T::kHeadDim; c += T::kThreads) {
    ChannelCode channel{0, 0, 0, kZero, 0, 0, {}};
    for (int s = 0, first = 0; s < num_segments; ++s) {
      const RowSegment& segment = rows.segments[s];
      const BitSegment& place = segment.place;
      const int of_segment = c - place.first_channel;
      if (of_segment >= 0 && of_segment < place.channels) {
        const int unit = of_segment / kUnitChannels * kUnitChannels;
        channel.first_bit = static_cast<std::uint16_t>(place.first_bit + unit * place.bits);
        channel.in_unit = static_cast<std::uint8_t>(of_segment - unit);
        channel.unit_channels = static_cast<std::uint8_t>(min(place.channels - unit, kUnitChannels));
        channel.first_unit = static_cast<std::uint16_t>(first), channel.bits = static_cast<std::uint8_t>(place.bits);
        channel.number =
            static_cast<std::uint8_t>(code.one_scale ? 0 : segment.first_number + of_segment / segment.group_size);
      }
      first += 1 << place.bits;
    }
    block.channels()[c] = channel;
  }
  if (thread == 0) block.units()[kZero] = 0.0f;
  for (int s = 0, first = 0; s < num_segments; ++s) {
    const RowSegment& segment = rows.segments[s];
    for (int i = thread; i < 1 << segment.place.bits; i += T::kThreads) {
      // A scale of a group of symmetric codes has the step in it.
      const auto one = static_cast<std::uint8_t>(i);
      const float x = segment.kind == CodeKind::symmetric && !code.one_scale
                          ? static_cast<float>(2 * i - (1 << segment.place.bits) + 1) * 0.5f
                          : generic::unit_value(segment, code.tables, &one, 1, 0);
      block.units()[first + i] = code.one_scale ? segment.gain * x : x;
    }
    first += 1 << segment.place.bits;
  }
  __syncthreads();
  if (thread < kMostRowNumbers) {
    float most = 0.0f;
    for (int s = 0, first = 0; s < num_segments; ++s) {
      const RowSegment& segment = rows.segments[s];
      const int groups = segment.place.channels / segment.group_size, count = 1 << segment.place.bits;
      if (code.one_scale ? thread == 0 : thread >= segment.first_number && thread < segment.first_number + groups)
        for (int i = 0; i < count; ++i) most = fmaxf(most, fabsf(block.units()[first + i]));
      first += count;
    }
    block.most()[thread] = most;
  }
  __syncthreads();
}

/// Copies a tile's rows to the warp's words. All lanes of a warp call it.
template <typename T>
__device__ __forceinline__ void load_words(const CodedBlock<T>& block, const std::byte* tile, const TileSide& side,
                                           bool value, int lane) {
  constexpr int kStride = CodedRowsLayout::kWordStride;
  unsigned* words = block.words();
  if (!value) {
    for (int i = lane; i < kTileTokens * side.row_words; i += 32) {
      const int token = i % kTileTokens, word = i / kTileTokens;
      words[token * kStride + word] =
          __ldg(reinterpret_cast<const unsigned*>(tile + key_word_offset(side, token, word)));
    }
    return;
  }
  for (int i = lane; i < 4 * side.row_words; i += 32) {
    const int two = i % 4 * 2, word = i / 4;
    unsigned bytes[4];  // byte 4 word + n of the tokens two, two + 8, two + 1, two + 9
#pragma unroll
    for (int n = 0; n < 4; ++n)
      bytes[n] = __ldg(reinterpret_cast<const unsigned*>(tile + value_byte_offset(side, two, 4 * word + n)));
    const unsigned a = __byte_perm(bytes[0], bytes[1], 0x5140), b = __byte_perm(bytes[2], bytes[3], 0x5140),
                   c = __byte_perm(bytes[0], bytes[1], 0x7362), d = __byte_perm(bytes[2], bytes[3], 0x7362);
    unsigned* of_two = words + two * kStride + word;
    of_two[0] = __byte_perm(a, b, 0x5410), of_two[8 * kStride] = __byte_perm(a, b, 0x7632);
    of_two[kStride] = __byte_perm(c, d, 0x5410), of_two[9 * kStride] = __byte_perm(c, d, 0x7632);
  }
}

/// Loads a tile's scales. Rows of tokens that are not coded get zeros, those of a lost page NaN. All lanes of a warp
/// call it. @param tile  null: of a lost page  @param coded  bit i: token i is coded
template <typename T>
__device__ __forceinline__ void load_scales(const CodedBlock<T>& block, const std::byte* tile, const TileSide& side,
                                            bool bfloat, unsigned coded, int lane) {
  if (lane >= kTileTokens) return;
  float *scales = block.scales() + lane, largest = 0.0f;
  for (int n = 0; n < side.numbers; ++n) {
    const float scale = !(coded >> lane & 1u) ? 0.0f
                        : !tile               ? kNaN
                                : generic::number_at(tile + number_offset(side, lane, 0, n), side, bfloat);
    scales[n * kTileTokens] = scale, largest = fmaxf(largest, fabsf(scale) * block.most()[n]);
  }
  // The largest magnitude becomes 2^14 to 2^15, as that of exact rows.
  const int exponent = max(static_cast<int>(__float_as_uint(largest) >> 23) - 127 - 14, -100);
  const float inverse = __uint_as_float(static_cast<unsigned>(127 - exponent) << 23);
  for (int n = 0; n < side.numbers; ++n) scales[n * kTileTokens] *= inverse;
  block.powers()[lane] = __uint_as_float(static_cast<unsigned>(127 + exponent) << 23);
}

/// Decodes the warp's words and scales to its rows. All lanes of a warp call it.
template <typename T>
__device__ __forceinline__ void decode_tile(const CodedBlock<T>& block, bool value, int lane) {
  constexpr int kStride = CodedRowsLayout::kWordStride;
#pragma unroll 1
  for (int c = lane; c < T::kHeadDim; c += 32) {
    const ChannelCode channel = block.channels()[c];
    const BitSegment unit{channel.bits, 0, channel.unit_channels, channel.first_bit};
    unsigned codes[kTileTokens] = {};
#pragma unroll 1
    for (int bit = 0; bit < channel.bits; ++bit) {
      const int at = value ? value_bit(unit, channel.in_unit, bit) : key_bit(unit, channel.in_unit, bit);
      const unsigned* word = block.words() + at / 32;
#pragma unroll
      for (int token = 0; token < kTileTokens; ++token) codes[token] += (word[token * kStride] >> at % 32 & 1u) << bit;
    }
    const float *units = block.units() + channel.first_unit, *scales = block.scales() + channel.number * kTileTokens;
#pragma unroll
    for (int token = 0; token < kTileTokens; ++token)
      *reinterpret_cast<__half*>(block.row(token) + 2 * c) = __float2half_rn(units[codes[token]] * scales[token]);
  }
}

/// c += the warp's rows times one half of the matrix.
template <typename T>
__device__ __forceinline__ void multiply_decoded(const CodedBlock<T>& block, int half, int lane, LinearSums<1>& c) {
  const uint4* matrix = block.matrix(half);
#pragma unroll 1
  for (int turn = 0; turn < T::kHeadDim / 32; ++turn, matrix += LinearRowsLayout::kTurnBytes / 16) {
    unsigned a[1][2][4];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const uint4 eight = *reinterpret_cast<const uint4*>(block.row(lane / 4 + 8 * r) + 64 * turn + 16 * (lane % 4));
      a[0][0][r] = eight.x, a[0][0][2 + r] = eight.y, a[0][1][r] = eight.z, a[0][1][2 + r] = eight.w;
    }
    multiply_turn(matrix, a, lane, c);
  }
}

/// Dequantizes one side of one head; `workers` blocks share the tokens, this block is number `worker`.
template <typename T, typename Destination>
__device__ __forceinline__ void dequantize_coded_side(const CodedBlock<T>& block, const Destination& destination,
                                                      const CacheFormat& format, bool value, int head, int worker,
                                                      int workers) {
  const PagedCacheView& cache = destination.cache();
  const TileSide& side = format.side(value);
  const PageLayout pages{format.k, format.v, cache.num_kv_heads, 1 << cache.page_shift};
  const int lane = static_cast<int>(threadIdx.x) % 32;
  constexpr int kMatrixBytes = T::layout().matrix().bytes();

  const DeviceRotation& rotation = value ? cache.rotation_v : cache.rotation_k;
  const std::byte* from = rotation.row_matrices + std::int64_t{rotation.per_head ? head : 0} * kMatrixBytes;
  for (int i = static_cast<int>(threadIdx.x) * 16; i < kMatrixBytes; i += T::kThreads * 16)
    ptx::cp_async_16(ptx::shared_address(block.shared + i), from + i);
  const float* centers = value ? cache.center_v : cache.center_k;
  for (int i = static_cast<int>(threadIdx.x); i < T::kHeadDim; i += T::kThreads)
    block.center()[i] = centers ? centers[head * T::kHeadDim + i] : 0.0f;
  ptx::cp_async_wait_all();
  prepare_codes(block, value ? cache.code_v : cache.code_k, head);

  const auto make = [&](const auto& output, int sequence, int first) {
    const PositionRange coded_range = output.tokens.coded_from(output.begin);
    const int end = min(first + kTileTokens, output.end);
    if (end <= output.begin) return;
    const auto in_output = [&](int position) { return position >= output.begin && position < end; };
    const unsigned coded =
        __ballot_sync(kAll, lane < kTileTokens && in_output(first + lane) && coded_range.contains(first + lane));
    float scale[2] = {};
    if (coded) {
      const std::byte* tile = page_tile(cache, pages, sequence, head, value, first);
      if (tile) load_words(block, tile, side, value, lane);
      load_scales(block, tile, side, format.bfloat(value), coded, lane);
      __syncwarp();
      decode_tile(block, value, lane);
      __syncwarp();
      scale[0] = block.powers()[lane / 4], scale[1] = block.powers()[lane / 4 + 8];
    }
    const std::byte* exact[2] = {};
    int token[2] = {};
    bool any_exact = false;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int of_tile = lane / 4 + 8 * r, position = first + of_tile;
      if (!in_output(position) || (coded >> of_tile & 1u)) continue;
      exact[r] = exact_tiles(cache, position < output.tokens.sink_end, sequence, head, position, token[r]) +
                 (value ? cache.ring_layout.k.bytes() : 0);
      token[r] %= kTileTokens, any_exact = true;
    }
    any_exact = __any_sync(kAll, any_exact);
#pragma unroll 1
    for (int half = 0; half < T::kHeadDim / LinearRowsLayout::kColumns; ++half) {
      LinearSums<1> c = {};
      if (coded) multiply_decoded(block, half, lane, c);
      if (any_exact) multiply_exact<T>(block.matrix(half), exact, token, lane, c, scale);
      const int column = half * LinearRowsLayout::kColumns;
#pragma unroll
      for (int four = 0; four < 2; ++four) {
        uint4 rows[2];
        finish_rows<T>(c[0], four, scale, {block.factors(half), block.factors(half)}, block.center() + column, lane,
                       rows);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const int position = first + lane / 4 + 8 * r;
          if (in_output(position)) *destination.address(output, position, column + 32 * four + lane % 4 * 8) = rows[r];
        }
      }
    }
    __syncwarp();  // before the rows are overwritten
  };
  for_warp_tiles<T, false>(destination, value, head, 0, worker, workers, make, make);
}

/// Grid [workers, 1, sides * Hkv]: keys of all heads, then values.
template <typename T, typename Destination>
__global__ void __launch_bounds__(T::kThreads, T::kMinBlocks)
    coded_dequantize_kernel(const __grid_constant__ Destination destination, const __grid_constant__ CacheFormat format,
                            LaunchedSides sides) {
  extern __shared__ __align__(16) unsigned char memory[];
  const int heads = destination.cache().num_kv_heads, z = static_cast<int>(blockIdx.z);
  const bool value = sides.is_value(z, heads);
  dequantize_coded_side<T>(CodedBlock<T>{memory}, destination, format, value, z % heads, static_cast<int>(blockIdx.x),
                           static_cast<int>(gridDim.x));
}

}  // namespace kvq::dequantize
