#pragma once

#include <kvq/plan/layer_plan.h>
#include <kvq/runtime/kernels/decode/variant.h>
#include <kvq/runtime/kernels/plan_step/params.h>
#include <kvq/runtime/kernels/quantize_write/variant.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

/// Caches of several layers and sequences on the device, driven step by step.
namespace kvq::test {

/// Input of plan_step, on the host.
struct StepCase {
  std::vector<int> seq_lens, token_indptr;
  std::vector<std::vector<int>> page_tables;  ///< of each sequence
  bool csr = false;                           ///< page tables are passed as one list
  std::vector<int> sink_slots, ring_slots;    ///< of each sequence; -1: none
  std::vector<int> exact_from;                ///< of each sequence
  std::vector<std::uint64_t> ids;             ///< of each sequence
  int num_pages = 0, num_slots = 0;           ///< of the pools; sinks and rings are as many
  int page_size = 64, sink_tokens = 0, recent_tokens = 0, max_rollback = 0, ring_rows = 0;
  int num_tokens = 0;  ///< rows, at least token_indptr.back()
  int sink_rows() const { return (sink_tokens + 15) / 16 * 16; }
};

struct StepResult {
  std::vector<std::int64_t> slot_mapping, window_mapping;
  FaultRecord fault = {};  ///< of run_step_case() alone
};

/// Runs plan_step alone. @throws std::runtime_error for a status or a CUDA error; so do the functions below
StepResult run_step_case(const StepCase& c);

struct WindowCase {
  const WriteVariant* write = nullptr;
  const DecodeVariant* decode = nullptr;  ///< null: no decoding
  int num_layers = 2, num_kv_heads = 2, heads = 2;
  ScaleRule rule_k = ScaleRule::minmax, rule_v = ScaleRule::minmax;
  int order = 1;                    ///< Hadamard blocks of keys and values
  std::vector<float> matrix;        ///< [D, D] instead of Hadamard blocks, for all heads and both sides; not for decode
  std::vector<float> inverse = {};  ///< of a matrix that is not orthogonal; for bfloat16 rows
  std::vector<float> scale = {};    ///< [Hkv, D] channel_scale of both sides, or empty
  std::vector<float> center;        ///< [Hkv, D], of both sides, or empty
  std::vector<double> clip;         ///< [Hkv] clip ratios of sides with rule minmax, or empty
  int max_tokens = 0;               ///< most rows of a step
  StepCase step;                    ///< except for lengths and rows
};

/// The TensorPlan of one side of a cache, for the codec.
TensorPlan cache_plan(const WindowCase& c, Side side);

/// Bits of decode's result in one layer, and its error against plain loops.
struct DecodeResult {
  std::vector<std::uint16_t> out;
  double error = 0.0, plain_error = 0.0;
};

class WindowCache {
 public:
  explicit WindowCache(const WindowCase& c);
  ~WindowCache();

  /// One step: plan_step, and for each layer quantize_write and decode.
  /// @param lengths  after the step
  /// @param rows     [layer][k, v] bits of [T, Hkv, D] of the new tokens
  /// @param tight    the step has as many rows as tokens, else max_tokens rows. Replayed steps are not tight
  void step(const std::vector<int>& lengths, const std::vector<int>& new_tokens,
            const std::vector<std::vector<std::uint16_t>> (&rows)[2], bool tight);
  /// From here on steps are replays of one captured step.
  void capture();
  /// Gives a sequence other slots, as if another one began with its pages.
  void set_slots(std::size_t sequence, int sink_slot, int ring_slot, int exact_from, std::uint64_t id);

  StepResult planned() const;  ///< by the last step
  StepCase asked() const;      ///< of the last step
  std::vector<std::byte> pages(int layer) const;
  std::vector<std::byte> sinks(int layer) const;
  std::vector<std::byte> rings(int layer) const;
  FaultRecord fault() const;  ///< the first one so far
  DecodeResult decoded(int layer) const;
  std::int64_t page_stride() const;
  PageLayout page_layout() const;
  WindowLayout sink_layout() const;
  WindowLayout ring_layout() const;

 private:
  struct Device;
  std::unique_ptr<Device> device_;
};

}  // namespace kvq::test
