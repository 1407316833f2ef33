#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <string_view>
#include <variant>
#include <vector>

namespace kvq {

enum class UniformLevels { affine, symmetric };
enum class ScaleRule { minmax, absmax, least_squares, norm, rms };
enum class ScaleType { fp16, bf16, fp32 };
enum class ZeroKind { floating, integer };  ///< stored beside the scale of an affine group: minimum or zero-point

/// Sixteen-bit rows: bfloat16 of x_rot.
struct ExactCoder {
  bool operator==(const ExactCoder&) const = default;
};

/// Uniform codes of 1 to 8 bits, formats/packing.md. Affine goes with minmax, symmetric with the other rules.
struct UniformCoder {
  int bits = 2;
  int group_size = 128;  ///< channels that share a scale; divides head_dim; 0 in mixed rows
  UniformLevels levels = UniformLevels::affine;
  ScaleRule rule = ScaleRule::minmax;
  ScaleType scale_type = ScaleType::fp16;
  ZeroKind zero = ZeroKind::floating;  ///< affine only
  bool operator==(const UniformCoder&) const = default;
  int numbers_per_group() const { return levels == UniformLevels::affine ? 2 : 1; }
};

/// Codes that index a table of numbers, packing.md (c). Rules: norm, least_squares, rms.
struct CodebookCoder {
  int bits = 2;          ///< 1..8; the largest width of mixed rows
  int group_size = 128;  ///< as for UniformCoder
  ScaleRule rule = ScaleRule::norm;
  ScaleType scale_type = ScaleType::fp16;
  bool per_head = false;                          ///< tables are [H, 2^b], else [2^b]
  bool fitted = false;                            ///< made from data, else Lloyd-Max for the marginal of the sphere
  std::map<int, std::vector<float>> tables = {};  ///< by width, ascending along a head's entries
  bool operator==(const CodebookCoder&) const = default;
};

/// How an encoder finds the codes of a trellis, packing.md (d). Decoding does not depend on it.
enum class TrellisSearch : std::uint8_t { binary32, integer };

/// theta of one width: the value of a channel is linear in the bits of the last memory + 1 codes.
struct TrellisTaps {
  int bits = 2;
  int memory = 3;
  TrellisSearch search = TrellisSearch::binary32;
  std::vector<float> theta = {};  ///< [bits * (memory + 1)], the channel's own code first, least significant bit first
  bool operator==(const TrellisTaps&) const = default;
};

/// Codes with memory, packing.md (d). Rules: norm, least_squares, rms. In mixed rows, a width without taps has
/// symmetric codes.
struct TrellisCoder {
  int bits = 2;
  int group_size = 128;
  ScaleRule rule = ScaleRule::norm;
  ScaleType scale_type = ScaleType::fp16;
  std::vector<TrellisTaps> taps = {};
  bool operator==(const TrellisCoder&) const = default;
  const TrellisTaps* find(int width) const;
  bool searches_integers() const;  ///< whether a width does
};

/// What a code means. Each concern (checks, tensors, JSON, coding, ...) is an overload set that std::visit calls
/// without a default, so a new alternative does not compile until every concern has an overload for it.
using Coder = std::variant<ExactCoder, UniformCoder, CodebookCoder, TrellisCoder>;

/// Names of coders in manifests and flags: one for each alternative of Coder, but two for UniformCoder, one for each of
/// its levels.
enum class CoderKind : std::uint8_t { exact, affine, symmetric, codebook, trellis };
inline constexpr std::array kCoderKinds = {CoderKind::exact, CoderKind::affine, CoderKind::symmetric,
                                           CoderKind::codebook, CoderKind::trellis};
CoderKind kind_of(const Coder& coder);
/// A coder of this kind whose other fields are defaults.
Coder default_coder(CoderKind kind);

int scale_bytes(ScaleType type);
const char* to_string(UniformLevels levels);
const char* to_string(ScaleRule rule);
const char* to_string(ScaleType type);
const char* to_string(ZeroKind zero);
const char* to_string(TrellisSearch search);
const char* to_string(CoderKind kind);

/// Whether rows are stored in bfloat16, without codes.
bool is_exact(const Coder& coder);
/// Whether clip ratios apply: scale rule minmax, because a clip narrows the range of a group.
bool takes_clip(const Coder& coder);

/// Bits of one channel's code: 16 for exact, the largest width for mixed rows.
int code_bits(const Coder& coder);
/// Channels that share a scale; 0 for exact and for mixed rows.
int group_size(const Coder& coder);
/// Rule and type of the stored scales; those of a default UniformCoder for exact.
ScaleRule scale_rule(const Coder& coder);
ScaleType scale_type(const Coder& coder);
/// Numbers stored for a group: 2 for affine, 0 for exact, else 1.
int numbers_per_group(const Coder& coder);
/// to_string() of kind_of().
const char* coder_name(const Coder& coder);
/// Bytes of one row of `dim` channels of one width: codes, scales and minima (formats/packing.md, "Bytes").
std::int64_t row_bytes(const Coder& coder, int dim);

}  // namespace kvq
