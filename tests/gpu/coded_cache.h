#pragma once

#include "device_memory.h"

#include <kvq/plan/layer_pages.h>
#include <kvq/runtime/kernels/common/format.h>
#include <kvq/runtime/kernels/common/page_view.h>

#include <cstdint>
#include <string>
#include <vector>

/// Caches whose pages the codec has written on the host, and attention over the rows as the codec decodes them.
namespace kvq::test {

struct CodedCase {
  TensorPlan k = {}, v = {};
  int k_dim = 0, v_dim = 0;
  int num_kv_heads = 2, heads = 3;  ///< query heads of a KV head
  int page_size = 32;
  std::vector<int> lengths = {};
  int sink_tokens = 0, recent_tokens = 0;
  std::vector<int> new_tokens = {};        ///< of each sequence; empty: one
  std::vector<int> first = {}, last = {};  ///< positions that queries see, that are dequantized; or empty
  bool masks = false;
  int sliding_window = 0;
  float softcap = 0.0f;
  bool sink_logits = false;
  int poisoned = -1;  ///< position of which head 0 has a row with NaN on both sides
  int lost = -1;      ///< sequence whose first page has no number
  bool bf16 = true;
  bool bits = false;   ///< dequantize and prefill with the tuned kernels for bit tiles (tuned_rows())
  bool tuned = false;  ///< decode with a tuned kernel, which must be built
  unsigned seed = 1;
};

/// Differences from plain loops in double, relative to the size of the result.
struct CodedOutcome {
  std::string failure;           ///< a call that failed, or a result that is NaN where it should not be, or the reverse
  double error = 0.0;            ///< root mean square
  double plain_error = 0.0;      ///< that of the expected result rounded to 16 bits
  double lse_error = 0.0;        ///< largest, absolute
  double lse_plain_error = 0.0;  ///< of prefill: that of exact sums over keys rounded to 16 bits
  int fault = 0;                 ///< code of the recorded fault
};

CodedOutcome decode_coded(const CodedCase& c);
CodedOutcome dequantize_coded(const CodedCase& c);
/// Prefill of `chunks` new tokens of each sequence over the cache.
CodedOutcome prefill_coded(const CodedCase& c, const std::vector<int>& chunks);

}  // namespace kvq::test
