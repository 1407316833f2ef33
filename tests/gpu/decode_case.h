#pragma once

#include <kvq/runtime/kernels/decode/variant.h>

#include <string>
#include <vector>

/// One decode attention call on random contents, compared with plain loops in double.
namespace kvq::test {

enum class CaseRotation {
  none,
  hadamard,
  dense,
  scaled,     ///< Hadamard blocks with scales of channels
  transform,  ///< dense and not orthogonal, of a condition near the bound
};
inline constexpr double kCaseCondition = 4000.0;

struct DecodeCase {
  int num_kv_heads = 2;
  int heads = 4;  ///< query heads of a KV head
  int page_size = 64;
  std::vector<int> lengths = {};
  int sink_tokens = 0, recent_tokens = 0, sliding_window = 0;
  CaseRotation rotation = CaseRotation::none;
  bool centers = false;                    ///< centers of both sides and learned sink logits
  float sink_level = 0.0f;                 ///< added to the sink logits
  bool indptr = false;                     ///< page table as one list
  bool shared_prefix = false;              ///< all sequences start with the pages of the first one
  float sharpness = 1.0f;                  ///< factor on softmax_scale
  std::vector<int> replay = {};            ///< lengths of a second run, as in a replayed graph; none longer than before
  std::vector<int> new_tokens = {};        ///< of each sequence, none more than its length; empty: one of each
  bool masks = false;                      ///< random token masks
  std::vector<int> first = {}, last = {};  ///< positions that queries may see: [first, last); empty: all
  float softcap = 0.0f;                    ///< DecodeParams::logit_softcap
  /// Scales and minima of a token's values are multiplied by a power of two up to 2^value_spread and down to its
  /// inverse; every eighth token has scales of 0.
  int value_spread = 0;
  unsigned seed = 1;
};

struct DecodeOutcome {
  std::string failure;       ///< error of a call, or the first element that is not a number; empty if none
  double error = 0.0;        ///< relative, of the result
  double plain_error = 0.0;  ///< error of plain loops in float, rounded like the result
  double lse_error = 0.0;    ///< largest, absolute
  double lse_plain_error = 0.0;
};

/// Is there a device to run on?
bool have_device();

/// @throws std::runtime_error if a CUDA call that is not under test fails
DecodeOutcome run_decode_case(const DecodeVariant& variant, const DecodeCase& c);

}  // namespace kvq::test
