#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string_view>

/// The tuned kernels of runtime/variants.json as plain data, made by the build (scripts/cmake/KvqKernelRows.cmake).
namespace kvq {

/// What a kernel does: attend to a paged cache, store new rows, write a prefix
/// as 16-bit rows, attend with many queries.
enum class KernelVerb : std::uint8_t { decode, quantize_write, dequantize, prefill };

inline constexpr std::array kKernelVerbs = {KernelVerb::decode, KernelVerb::quantize_write, KernelVerb::dequantize,
                                            KernelVerb::prefill};

/// Index in an array of all verbs.
constexpr std::size_t index(KernelVerb verb) { return static_cast<std::size_t>(verb); }
/// The word of variants.json: "decode", "quantize_write", ...
const char* to_string(KernelVerb verb);

/// What KVQ_KERNELS may be; each has the kernels of those before it.
enum class KernelSet : std::uint8_t { few, tests, all };

/// One tuned kernel. An empty text or 0 means: the kernel is for all.
struct KernelRow {
  KernelVerb verb = KernelVerb::decode;
  int head_dim = 0;                  ///< of keys and values
  std::string_view k = {}, v = {};   ///< formats of the sides, see side_name()
  int heads = 0;                     ///< rows of a work tile; more query heads of a KV head are several passes
  std::string_view activation = {};  ///< "bf16" or "fp16"
  KernelSet set = KernelSet::all;    ///< the smallest that has the kernel
};

/// The kernels of all formats, whatever KVQ_KERNELS is.
std::span<const KernelRow> kernel_rows();

}  // namespace kvq
