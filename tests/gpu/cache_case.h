#pragma once

#include "decode_case.h"

#include <kvq/runtime/kernels/dequantize/variant.h>

#include <cstdint>
#include <string>
#include <vector>

/// Caches with random contents; results of kernels that read them are compared with plain loops in double.
namespace kvq::test {

struct CacheCase {
  int num_kv_heads = 2;
  int page_size = 64;
  std::vector<int> lengths = {};  ///< tokens in the cache
  int sink_tokens = 0, recent_tokens = 0;
  CaseRotation rotation = CaseRotation::none;
  bool centers = false;
  bool indptr = false;  ///< page table as one list
  unsigned seed = 1;
  /// Of each sequence, or empty: tokens before this position are not in the cache, and pages of such tokens alone have
  /// no number.
  std::vector<int> hidden = {};
};

struct DequantizeCase {
  std::vector<int> first = {}, last = {};  ///< of each sequence, or empty
  int gap = 0;                             ///< elements between the rows of tokens, a multiple of 8
};

struct PrefillCase {
  int heads = 4;                  ///< query heads of a KV head
  std::vector<int> chunks = {};   ///< new tokens of each sequence
  std::vector<int> written = {};  ///< number of the chunk's tokens that are in the cache already; empty: none
  std::vector<int> replay = {};   ///< chunks of a second run, as in a replayed graph; none longer than before
  int sliding_window = 0;
  bool sinks = false;                ///< learned sink logits
  float sharpness = 1.0f;            ///< factor on softmax_scale
  float softcap = 0.0f;              ///< PrefillParams::logit_softcap
  std::int64_t workspace_bytes = 0;  ///< limit
  bool portable = false;
  bool generic = false;  ///< generic attention, even if there is a tuned variant
};

struct CacheOutcome {
  std::string failure;       ///< error of a call, or fault of the result other than its error; empty if none
  double error = 0.0;        ///< relative, of the result
  double plain_error = 0.0;  ///< error of plain loops in float from 16-bit rows, rounded like the result
  double lse_error = 0.0;    ///< largest, absolute
  double lse_plain_error = 0.0;
};

/// @throws std::runtime_error if a CUDA call that is not under test fails
CacheOutcome run_dequantize_case(const DequantizeVariant& variant, const CacheCase& cache, const DequantizeCase& c);
CacheOutcome run_prefill_case(const DequantizeVariant& rows, const CacheCase& cache, const PrefillCase& c);

}  // namespace kvq::test
