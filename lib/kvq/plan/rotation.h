#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace kvq {

enum class RotationKind { identity, block_hadamard, dense };
enum class Scope { kv_head, layer };  ///< one map (clip ratio, center) per KV head, or one for the layer

/// The linear map before quantization: x_rot = (x - center) @ A, and back x = x_hat_rot @ A^-1 + center
/// (formats/artifact.md, "One formula"). A is orthogonal unless `channel_scale` or `inverse` is there.
struct Rotation {
  RotationKind kind = RotationKind::identity;
  Scope scope = Scope::kv_head;
  int order = 0;  ///< block_hadamard: power of two dividing D; also the H of a dense recipe, 0 = none
  std::vector<std::int8_t> signs = {};  ///< [H, D] of +1, -1, or empty; block_hadamard: x * signs, then the blocks
  std::vector<float> channel_scale =
      {};  ///< [H, D] positive bfloat16 numbers, or empty; identity and block_hadamard: x * channel_scale comes first
  std::vector<float> matrix = {};  ///< [H, D, D] row-major, kind dense only: A
  std::vector<float> inverse =
      {};  ///< [H, D, D] A^-1, kind dense only; empty: A is orthogonal, and its inverse its transpose

  // The fields below explain the matrix to people and to tools that compare artifacts; a runtime does not need them.
  std::string recipe = "I";                   ///< factors from left to right, "U*H*P"
  std::string target = {};                    ///< moment whose eigenbasis U is: "query", "scored_value", ...
  std::vector<std::string> sign_choice = {};  ///< [H] "canonical" or "random <index> of <n>", or empty
  std::vector<float> eigenbasis = {};         ///< [H, D, D], columns are eigenvectors, or empty
  std::vector<float> spectrum = {};           ///< [H, D] descending, or empty

  bool is_orthogonal() const { return channel_scale.empty() && inverse.empty(); }
  /// Index of a KV head's block in the [H, ...] arrays.
  int head_index(int kv_head) const { return scope == Scope::layer ? 0 : kv_head; }
};

const char* to_string(RotationKind kind);
const char* to_string(Scope scope);

/// Largest power of two that divides `dim`: the order of the Hadamard blocks for any head_dim.
int hadamard_order(int dim);

}  // namespace kvq
