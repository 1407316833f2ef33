#include <kvq/core/dtype.h>
#include <kvq/core/error.h>
#include <kvq/runtime/device_memory.h>
#include <kvq/runtime/golden_pages.h>
#include <kvq/runtime/kernel_choice.h>
#include <kvq/runtime/part_rounding.h>
#include <kvq/runtime/selftest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <numeric>
#include <optional>
#include <vector>

namespace kvq {

namespace {

/// One layer's golden rows on the current device.
class Replay {
 public:
  /// @param rows  with tokens in the type of layer.key
  Replay(const LoadedLayer& layer, const LayerPointers& pointers, const GoldenRows& rows, cudaStream_t stream)
      : layer_(layer),
        pointers_(pointers),
        rows_(rows),
        expected_pages_(golden_pages(layer.plan, layer.pages, rows_)),
        stream_(stream) {}

  SelftestLayer run() {
    SelftestLayer result{.layer = layer_.plan.layer};
    part(result.write, result.message, [&] { write(result); });
    part(result.decode, result.message, [&] { decode(result); });
    return result;
  }

 private:
  /// Runs one part of the test, write or decode. An unsupported error becomes the part's status and does not stop the
  /// other part.
  template <typename Work>
  static void part(StatusCode& status, std::string& message, Work&& work) {
    try {
      work();
    } catch (const Error& error) {
      if (error.kind() != ErrorKind::unsupported) throw;
      status = StatusCode::unsupported;
      if (message.empty()) message = error.what();
    }
  }
  static void expect(const Status& status, const char* what) {
    if (status.ok()) return;
    throw Error{status.code() == StatusCode::unsupported ? ErrorKind::unsupported : ErrorKind::internal,
                fmt::format("self-test: {}: {}", what, status.message())};
  }
  static void fail(StatusCode& status, std::string& message, std::string fault) {
    // A fault replaces the status of a part that was not run.
    status = StatusCode::mismatch;
    message = std::move(fault);
  }

  int shift() const { return std::countr_zero(static_cast<unsigned>(layer_.pages.page_size)); }

  void write(SelftestLayer& result) {
    const WriteVariant variant = choose_write(layer_.key);
    WriteLaunch launch;
    expect(variant.plan(launch), "write");
    const auto count = static_cast<std::size_t>(rows_.tokens.count);
    std::vector<std::int64_t> slots(count);
    std::iota(slots.begin(), slots.end(), 0);
    const DeviceMemory k = to_device(std::span(rows_.tokens.k), stream_),
                       v = to_device(std::span(rows_.tokens.v), stream_);
    const DeviceMemory mapping = to_device<std::int64_t>(slots, stream_);
    // Bits that no row has, so that slots that are not written are found.
    std::vector<std::byte> pages(expected_pages_.size(), std::byte{0xFF});
    const DeviceMemory pool = to_device<std::byte>(pages, stream_);

    WriteParams p;
    p.num_tokens = static_cast<int>(count), p.num_kv_heads = layer_.heads.num_kv;
    p.k = pointers_.write_k, p.v = pointers_.write_v;
    p.k.x = k.get(), p.v.x = v.get();
    p.k.token_stride = std::int64_t{p.num_kv_heads} * layer_.pages.k.head_dim;
    p.v.token_stride = std::int64_t{p.num_kv_heads} * layer_.pages.v.head_dim;
    p.slot_mapping = mapping.get<std::int64_t>();
    p.pages = pool.get(), p.page_shift = shift(), p.page_stride = layer_.pages.page_bytes();
    expect(check_write(variant, p), "write");
    expect(variant.run(launch, p, stream_), "write");
    to_host<std::byte>(pool, pages, stream_);

    const PageDifference difference = compare_pages(layer_.plan, layer_.pages, rows_, pages);
    result.rows = difference.rows, result.firm_rows = difference.firm_rows;
    result.firm_faults = difference.firm_faults, result.soft_faults = difference.soft_faults;
    if (!difference.first.empty()) fail(result.write, result.message, difference.first);
  }

  void decode(SelftestLayer& result) {
    const LayerGeometry& g = layer_.plan.geometry;
    const DecodeVariant variant = choose_decode(layer_.key);
    DecodeLaunch launch;
    expect(variant.plan(launch), "decode");
    const auto elements = static_cast<std::size_t>(g.num_q_heads) * static_cast<std::size_t>(g.v_head_dim);
    std::vector<std::int32_t> table(expected_pages_.size() / static_cast<std::size_t>(layer_.pages.page_bytes()));
    std::iota(table.begin(), table.end(), 0);
    const std::vector<std::int32_t> lengths = {static_cast<std::int32_t>(rows_.tokens.count)};
    const DeviceMemory q = to_device(std::span(rows_.tokens.q), stream_),
                       pool = to_device<std::byte>(expected_pages_, stream_);
    const DeviceMemory seq_lens = to_device<std::int32_t>(lengths, stream_),
                       pages = to_device<std::int32_t>(table, stream_);
    const DeviceMemory workspace(decode_workspace_bytes(launch, static_cast<std::size_t>(g.num_kv_heads)));
    std::vector<std::uint16_t> out(elements, 0xFFFF);  // NaN
    const DeviceMemory result_memory = to_device<std::uint16_t>(out, stream_);

    DecodeParams p;
    p.cache.batch = 1, p.num_q_heads = g.num_q_heads, p.cache.num_kv_heads = g.num_kv_heads;
    p.softmax_scale = static_cast<float>(g.softmax_scale), p.sliding_window = g.sliding_window;
    p.logit_softcap = static_cast<float>(g.logit_softcap);
    p.q = q.get(), p.q_stride = std::int64_t{g.num_q_heads} * g.head_dim;
    p.out = result_memory.get(), p.out_stride = std::int64_t{g.num_q_heads} * g.v_head_dim;
    p.cache.seq_lens = seq_lens.get<std::int32_t>();
    p.cache.pages = pool.get(), p.cache.page_shift = shift(), p.cache.page_stride = layer_.pages.page_bytes();
    p.cache.page_table = pages.get<std::int32_t>(), p.cache.page_table_stride = static_cast<std::int64_t>(table.size());
    p.cache.rotation_k = pointers_.rotation_k, p.cache.rotation_v = pointers_.rotation_v;
    p.cache.center_k = pointers_.center_k, p.cache.center_v = pointers_.center_v;
    p.cache.code_k = pointers_.code_k, p.cache.code_v = pointers_.code_v;
    p.workspace = workspace.get();
    expect(check_decode(variant, p), "decode");
    expect(variant.run(launch, p, stream_), "decode");
    to_host<std::uint16_t>(result_memory, out, stream_);
    compare_output(out, static_cast<std::size_t>(g.v_head_dim), result);
  }

  void compare_output(const std::vector<std::uint16_t>& out, std::size_t dim, SelftestLayer& result) const {
    const auto to_float = layer_.key.bf16 ? bf16_to_float : f16_to_float;
    std::string fault;
    for (std::size_t first = 0; first < out.size(); first += dim) {
      const double tolerance =
          kSelftestOutputTolerance + output_rounding(layer_.plan, *layer_.golden, static_cast<int>(first / dim));
      float largest = 0.0f;
      for (std::size_t i = 0; i < dim; ++i) largest = std::max(largest, std::abs(rows_.out[first + i]));
      for (std::size_t i = 0; i < dim; ++i) {
        const float expected = rows_.out[first + i], found = to_float(out[first + i]);
        const double error = std::abs(static_cast<double>(found) - static_cast<double>(expected)) /
                             std::max(static_cast<double>(largest), 1e-30);
        if (std::isfinite(error)) result.output_error = std::max(result.output_error, error);
        if (!(error <= tolerance) && fault.empty())
          fault =
              fmt::format("output of query head {} channel {}: expected {}, found {}", first / dim, i, expected, found);
      }
    }
    if (!fault.empty())
      fail(result.decode, result.message, result.write == StatusCode::mismatch ? result.message : fault);
  }

  const LoadedLayer& layer_;
  const LayerPointers& pointers_;
  const GoldenRows& rows_;
  std::vector<std::byte> expected_pages_;
  cudaStream_t stream_;
};

}  // namespace

StatusCode SelftestLayer::status() const {
  for (const StatusCode code : {StatusCode::mismatch, StatusCode::unsupported})
    if (write == code || decode == code) return code;
  return StatusCode::ok;
}

SelftestLayer selftest(const LoadedLayer& layer, const LayerPointers& pointers, CUstream_st* stream) {
  const auto not_run = [&](const char* why) {
    return SelftestLayer{
        .layer = layer.plan.layer,
        .write = StatusCode::unsupported,
        .decode = StatusCode::unsupported,
        .message = why,
    };
  };
  if (!layer.golden)
    return not_run("the artifact has no golden rows for this layer: kvq-calibrate --golden-tokens writes them");
  const GoldenRows golden = golden_in_parts(layer.plan, *layer.golden);
  if (layer.key.bf16) return Replay(layer, pointers, golden, stream).run();
  const std::optional<GoldenRows> rows = golden_in_fp16(golden);
  if (!rows) return not_run("golden rows, which are bfloat16, are beyond the largest number of fp16");
  return Replay(layer, pointers, *rows, stream).run();
}

}  // namespace kvq
